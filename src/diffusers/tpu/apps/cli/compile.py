"""`diffusers-tpu compile`: a run's executables made before it, on any machine."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ... import planner
from ...config import parse_mesh, read_environment
from ...planner import ahead
from ...planner.aot import ChildError, NoCompiler, OutOfMemory
from .arguments import given_arguments
from .choices import PLAN_ARGUMENTS
from .errors import BadInput, one_line
from .output import check_writable, write_json
from .plan import number


def run(options, rest: list[str]) -> int:
    """Run the command; exit status 1 if a program of the run is not kept."""
    folder = options.output or read_environment().cache_dir
    if folder is None:
        raise BadInput("expected --output DIR where DIFFUSERS_TPU_CACHE=off keeps nothing")
    if options.batch < 1:
        raise BadInput(f"expected --batch of at least 1, got {options.batch}")
    if options.json and options.json != "-":
        check_writable(options.json, ".json")
    arguments = {name: number(name, words) for name, words in given_arguments(options, rest, PLAN_ARGUMENTS).items()}
    made = _make(options, Path(folder).absolute(), arguments)
    write_json(options.json, made)
    if options.json != "-":
        _show(made, options, folder)
    for reason in made["left"]:
        print(f"diffusers-tpu: not kept: {reason}", file=sys.stderr)
    return 1 if made["left"] else 0


def _make(options, folder: Path, arguments: dict) -> dict:
    try:
        request = planner.request_of(
            options.model,
            options.topology,
            mesh=options.mesh and parse_mesh(options.mesh),
            dtype=options.dtype,
            batch=options.batch,
            arguments=arguments,
            tiling=options.tiling,
            config={} if options.attention == "auto" else {"attention": options.attention},
        )
        with Console(stderr=True).status(f"compiling for {options.topology}") as status:
            return ahead.make(request, folder, status.update)
    except (ValueError, NoCompiler) as error:
        raise BadInput(one_line(error)) from error
    except (ChildError, OutOfMemory) as error:
        print(f"diffusers-tpu: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _show(made: dict, options, folder: str):
    table = Table("program", "branches", "seconds", "MB", title=f"{options.model} for {options.topology}")
    for column in table.columns[1:]:
        column.justify = "right"
    for program in made["programs"]:
        seconds = "was there" if program["was_there"] else f"{program['seconds']:.1f}"
        table.add_row(program["name"], str(program["branches"]), seconds, f"{program['bytes'] / 1e6:.1f}")
    console = Console()
    console.print(table)
    console.print(f"{made['bytes'] / 1e6:.1f} MB in {folder}", soft_wrap=True)
