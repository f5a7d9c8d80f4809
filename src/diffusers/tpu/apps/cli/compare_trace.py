"""`diffusers-tpu compare --trace`: what keeps the components of a model from being compiled, with file and line."""

import dataclasses
import json
import os

import torch
from rich.console import Console

from .arguments import flag, given_arguments
from .compare import OF_A_COMPONENT
from .errors import BadInput, one_line
from .plan import number


def run(options, rest: list[str]) -> int:
    """The command; exit status 1 if there is an obstacle, or a trace did not come to its end."""
    for name in (*OF_A_COMPONENT, "mesh", "seed"):
        if getattr(options, name):
            raise BadInput(f"expected --trace without {flag(name)}, got both: a trace computes nothing")
    if len(options.dtype or []) > 1:
        raise BadInput(f"expected --dtype once with --trace, got {options.dtype}")
    arguments = {name: number(name, words) for name, words in given_arguments(options, rest).items()}
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a TPU that is here stays free
    from ...planner import obstacles

    quiet = Console(stderr=True)
    dtype = getattr(torch, (options.dtype or ["bfloat16"])[0])
    only = [options.component] if options.component else None
    with quiet.status(f"tracing {options.model}") as status:
        try:
            found = obstacles.list_obstacles(options.model, dtype, arguments, options.planned, only, status.update)
        except (ValueError, TypeError) as error:
            raise BadInput(one_line(error)) from error
    if options.json:
        print(json.dumps([as_dict(traced) for traced in found], indent=2))
    else:
        _show(found, Console())
    return 0 if not any(traced.obstacles or traced.stopped for traced in found) else 1


def as_dict(traced) -> dict:
    return {**dataclasses.asdict(traced), "obstacles": [dataclasses.asdict(one) for one in traced.obstacles]}


def _show(found, console: Console):
    def say(text: str):
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    for traced in found:
        name = f"{traced.component} ({traced.kind}: {', '.join(traced.entries)})"
        say(f"{name}:" if traced.obstacles or traced.stopped else f"{name}: nothing stops it")
        for one in traced.obstacles:
            say(f"  {short(one.file)}:{one.line}: {one.what}")
            say(f"      {one.code}")
        for words in traced.stopped:
            say(f"  a trace ends at {words}")
    lines = sum(len(traced.obstacles) for traced in found)
    say(
        f"{lines} {'obstacle' if lines == 1 else 'obstacles'}; components traced: {len(found)}; nothing was compiled, no weight"
        " was read"
    )


def short(file: str) -> str:
    """A file of an installed package from the package's name on."""
    for root in (PACKAGES, os.path.dirname(os.path.dirname(torch.__file__))):
        if file.startswith(root + os.sep):
            return os.path.relpath(file, root)
    return file


PACKAGES = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
)
