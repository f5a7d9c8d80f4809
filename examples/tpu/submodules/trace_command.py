"""`diffusers-tpu compare --trace`: prints the obstacles to tracing."""

import dataclasses
import json
import os
from pathlib import Path

import torch
from rich.console import Console

from diffusers.tpu.apps.cli.errors import refusing
from diffusers.tpu.apps.cli.output import say
from diffusers.tpu.common.files import PACKAGE

from .trace import list_obstacles


def run(options, arguments: dict) -> int:
    """Runs the command; returns exit status 1 if there are obstacles."""
    quiet = Console(stderr=True)
    dtype = getattr(torch, (options.dtype or ["bfloat16"])[0])
    only = [options.component] if options.component else None
    with quiet.status(f"tracing {options.model}") as status, refusing(ValueError, TypeError):
        found = list_obstacles(options.model, dtype, arguments, options.planned, only, status.update)
    if options.json:
        print(json.dumps([dataclasses.asdict(traced) for traced in found], indent=2))
    else:
        for line in _obstacles(found):
            say(line)
    return 0 if not any(traced.obstacles or traced.stopped for traced in found) else 1


def _obstacles(found):
    for traced in found:
        name = f"{traced.component} ({traced.kind}: {', '.join(traced.entries)})"
        yield f"{name}:" if traced.obstacles or traced.stopped else f"{name}: nothing stops it"
        for one in traced.obstacles:
            yield f"  {short(one.file)}:{one.line}: {one.what}"
            yield f"      {one.code}"
        yield from (f"  a trace ends at {words}" for words in traced.stopped)
    lines = sum(len(traced.obstacles) for traced in found)
    yield (
        f"{lines} {'obstacle' if lines == 1 else 'obstacles'}; components traced: {len(found)}; nothing was compiled, no weight"
        " was read"
    )


def short(file: str) -> str:
    """Returns the path of a file relative to its installed package's parent folder."""
    for root in (PACKAGE.parent, Path(torch.__file__).parents[1]):
        if Path(file).is_relative_to(root):
            return os.path.relpath(file, root)
    return file
