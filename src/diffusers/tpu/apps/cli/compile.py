"""`diffusers-tpu compile`: a run's executables made before it, on any machine."""

import sys
from pathlib import Path

from rich.console import Console

from ... import planner
from ...config import parse_mesh, read_environment
from ...planner import ahead
from ...planner.aot import NoCompiler
from .errors import BadInput, refusing
from .output import check_writable, table, write_json
from .plan import asked


def run(options, rest: list[str]) -> int:
    """Run the command; exit status 1 if a program of the run is not kept."""
    folder = options.output or read_environment().cache_dir
    if folder is None:
        raise BadInput("expected --output DIR where DIFFUSERS_TPU_CACHE=off keeps nothing")
    settings = asked(options, rest)
    check_writable(options.json, ".json")
    with refusing(ValueError, NoCompiler):
        mesh = options.mesh and parse_mesh(options.mesh)
        request = planner.request_of(options.model, options.topology, mesh=mesh, **settings)
        with Console(stderr=True).status(f"compiling for {options.topology}") as status:
            made = ahead.make(request, Path(folder).absolute(), status.update)
    write_json(options.json, made)
    if options.json != "-":
        console = Console()
        rows = (
            (
                p["name"],
                p["branches"],
                "was there" if p["was_there"] else f"{p['seconds']:.1f}",
                f"{p['bytes'] / 1e6:.1f}",
            )
            for p in made["programs"]
        )
        title = f"{options.model} for {options.topology}"
        console.print(table(("program", "branches", "seconds", "MB"), rows, title=title))
        console.print(f"{made['bytes'] / 1e6:.1f} MB in {folder}", soft_wrap=True)
    for reason in made["left"]:
        print(f"diffusers-tpu: not kept: {reason}", file=sys.stderr)
    return 1 if made["left"] else 0
