"""`diffusers-tpu serve`: a pipeline behind HTTP, see the room `serving`."""

import importlib.util
import os
from pathlib import Path

from rich.console import Console

from . import arguments, generate, session
from .errors import BadInput, calling, loading


TOKEN = "DIFFUSERS_TPU_TOKEN"
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
OF_REQUESTS = ("prompt", "height", "width", "num_frames")


def run(options, rest: list[str]) -> int:
    """The command; returns its exit status, 0 when it was asked to end."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"expected what serving needs, {', '.join(missing)} is not installed: pip install '.[serve]'")
    target = session.choose_target(options.device)
    mesh = session.mesh_of(options.mesh, target)
    cls = session.pipeline_class(options.model)
    given = arguments.given_arguments(options, rest)
    for name in OF_REQUESTS:
        if name in given:
            raise BadInput(f"expected no {arguments.flag(name)}: requests say it; sizes are given with --sizes")
    call = arguments.call_arguments(cls, given)
    from ..serving import server

    with loading():
        settings = _settings(options, cls, call)
        bound = server.bind(settings.host, settings.port)  # before minutes of compiling
    console = Console()
    with bound:
        pipe = generate.placed(session.load(options.model, generate.dtype_of(options)), options, target, mesh)
        pipe.set_progress_bar_config(disable=True)
        with calling():
            server.run(pipe, settings, bound, lambda address: _tell(console, settings.model, address))
    return 0


def _tell(console: Console, model: str, address: str):
    console.print(f"serving {model} at {address}", markup=False, highlight=False, soft_wrap=True)


def _settings(options, cls: type, call: dict):
    """Raises ValueError for what no server can be started with."""
    from ..serving import sizes
    from ..serving.limits import Limits
    from ..serving.server import Settings

    limits = {name: value for name in Limits.__annotations__ if (value := getattr(options, name)) is not None}
    frames = sizes.default_frames(cls)
    texts = [text for texts in options.sizes or [] for text in texts.split(",")]
    has_page = importlib.util.find_spec("gradio") is not None
    if options.page and not has_page:
        raise BadInput("expected Gradio for the page, it is not installed: pip install '.[serve]', or --no-page")
    return Settings(
        model=options.name or Path(options.model).name,
        defaults=call,
        sizes=tuple(sizes.parse(text, frames) for text in texts),
        any_size=options.any_size,
        max_batch=options.max_batch,
        fps=options.fps,
        grace=options.grace,
        host=options.host,
        port=options.port,
        token=options.token or os.environ.get(TOKEN) or None,
        page=options.page,
        limits=Limits(**limits),
    )
