"""`diffusers-tpu serve`: serves a pipeline over HTTP, see the package `serving`."""

import importlib.util
import os
from pathlib import Path

from ..generation.signature import OF_BATCHES
from . import session
from .arguments import flag
from .output import say


TOKEN = "DIFFUSERS_TPU_TOKEN"
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
OF_REQUESTS = ("prompt", "height", "width", "num_frames", *OF_BATCHES)
SETTINGS = ("any_size", "max_batch", "fps", "grace", "host", "port", "page")


def run(options, rest: list[str]) -> int:
    """Run the command until a signal ends it; exit status 0."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"expected what serving needs, {', '.join(missing)} is not installed: pip install '.[serve]'")
    target = session.chosen(options)
    mesh = session.mesh_of(options.mesh, target)
    cls, call = session.asked(options, rest)
    for name in OF_REQUESTS:
        if name in call:
            raise ValueError(f"expected no {flag(name)}: requests say what is made, and --sizes which sizes")
    if options.page and importlib.util.find_spec("gradio") is None:
        raise ValueError("expected Gradio for the page, it is not installed: pip install '.[serve]', or --no-page")
    from ..serving import server, sizes

    limits = {n: value for n in sizes.Limits.__annotations__ if (value := getattr(options, n)) is not None}
    texts = [text for texts in options.sizes or [] for text in texts.split(",")]
    settings = sizes.Settings(
        model=options.name or Path(options.model).name,
        defaults=call,
        sizes=tuple(sizes.parse(text, sizes.default_frames(cls)) for text in texts),
        token=options.token or os.environ.get(TOKEN) or None,
        limits=sizes.Limits(**limits),
        **{name: getattr(options, name) for name in SETTINGS},
    )
    bound = server.bind(settings.host, settings.port)  # before minutes of compiling
    with bound:
        pipe = session.load(options, target, mesh)
        pipe.set_progress_bar_config(disable=True)
        server.run(pipe, settings, bound, lambda address: say(f"serving {settings.model} at {address}"))
    return 0
