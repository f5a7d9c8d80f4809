"""`diffusers-tpu plan`: does a model fit a slice, how fast is a step, and why; `diffusers-tpu compile`: its executables."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from ... import planner
from ...chips.figures import find_topology
from ...common.config import parse_mesh, read_environment
from ...common.files import write_whole
from ...planner import ahead
from ...planner.measured import read_rates
from ...planner.report import page, step_ranges, summed
from .arguments import config_of, numbers
from .output import check_folder, say, table, write_json


def _asked(options, rest: list[str]) -> dict:
    """Arguments of `planner.request_of` for both commands, without model, slice and mesh."""
    plain = {name: getattr(options, name) for name in ("dtype", "batch", "tiling")}
    return {**plain, "arguments": numbers(options, rest), "config": config_of(options)}


def run(options, rest: list[str]) -> int:
    """Run `plan`; exit status 1 if the model fits none of the named slices."""
    topologies = [find_topology(name).name for word in options.topology for name in word.split(",")]
    mesh = options.mesh if options.mesh in (None, "auto") else parse_mesh(options.mesh)
    settings = {**_asked(options, rest), "mesh": mesh, "everything": options.everything, "seconds": options.time_limit}
    settings["train"] = options.train
    if options.measured:
        generations = [find_topology(name).chip.generation for name in topologies]
        settings["measured"] = read_rates(options.measured, generations)
    quiet, plans = Console(stderr=True), []
    for name in topologies:
        with quiet.status(f"asking the compiler about {name}") as status:
            plans.append(planner.plan(options.model, name, on_progress=status.update, **settings))
        if options.json != "-":
            _show(plans[-1])
    write_json(options.json, plans[0] if len(plans) == 1 else plans)
    if options.report:
        write_whole(Path(options.report), page(plans))
    for file in (options.json, options.report):
        if file not in (None, "-"):
            say(f"wrote {file}", stderr=options.json == "-")
    return 0 if any(plan["fits"] for plan in plans) else 1


def make_executables(options, rest: list[str]) -> int:
    """Run `compile`: writes a run's executables in advance, on any machine; exit status 1 if one is not stored."""
    if (folder := options.output or read_environment().cache_dir) is None:
        raise ValueError("expected --output DIR where DIFFUSERS_TPU_CACHE=off keeps nothing")
    settings = _asked(options, rest)
    mesh = options.mesh and parse_mesh(options.mesh)
    request = planner.request_of(options.model, options.topology, mesh=mesh, **settings)
    check_folder(Path(folder))
    with Console(stderr=True).status(f"compiling for {options.topology}") as status:
        made = ahead.make(request, Path(folder).absolute(), status.update)
    write_json(options.json, made)
    if options.json != "-":
        rows = []
        for program in made["programs"]:
            seconds = "was there" if program["was_there"] else f"{program['seconds']:.1f}"
            rows.append((program["name"], program["branches"], seconds, f"{program['bytes'] / 1e6:.1f}"))
        title = f"{options.model} for {options.topology}"
        Console().print(table(("program", "branches", "seconds", "MB"), rows, title=title))
        say(f"{made['bytes'] / 1e6:.1f} MB in {folder}")
    for reason in made["left"]:
        print(f"diffusers-tpu: not kept: {reason}", file=sys.stderr)
    return 1 if made["left"] else 0


def _show(plan: dict):
    for line in _lines(plan):
        say(line, markup=True)
    rows = []
    for part in plan["parts"]:
        name = f"{part['component']}.{part['entry']}" + (f" x{part['branches']}" if part["branches"] > 1 else "")
        seconds = "-" if part["seconds"] is None else f"{part['seconds']:.3f}"
        sizes = (f"{part['hbm_gib'][kind]:.2f}" for kind in ("weights", "activations"))
        rows.append((name, part["how"], part["runs"], seconds, *sizes, f"{part['flops'] / 1e12:.4g}"))
    names = ("part", "how", "runs", "s each", "weights", "activations", "TFLOP")
    Console().print(table(names, rows, 2, title="per chip"))
    if plan["seconds_per_step"]["total"] is not None:
        Console().print(table(("a step", "seconds", "share"), _times(plan), title="where the time goes"))
    for text in plan["ranking"]:
        shape = ",".join(str(degree) for degree in text["mesh"].values())
        exact = "" if text["seconds_per_step"] is None else f", compiled {text['seconds_per_step']:.3f} s"
        guessed = f"guessed {text['guessed_seconds_per_step']:.3f} s per step"
        say(f"mesh {shape}: {guessed}{exact}")
    for note in plan["notes"]:
        say(f"note: {note}")
    for advice in plan["advice"]:
        say(f"[bold]what would fit[/]: {advice}", markup=True)
    say("Compiled, not measured: see examples/tpu/PLANNING.md for how near the sum comes to hardware.\n")


def _lines(plan: dict) -> Iterator[str]:
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in plan["mesh"].items())
    hbm, step = plan["hbm_gib_per_chip"], plan["seconds_per_step"]
    yield f"[bold]{plan['model']}[/] compiled for [bold]{plan['topology']}[/], mesh {mesh}"
    over = hbm["peak"] - hbm["limit"]
    if plan["fits"]:
        yield f"[green]fits[/]: {hbm['peak']:.2f} of {hbm['limit']:.2f} GiB per chip"
    else:
        amount = f"by {over:.2f} GiB per chip " if over > 0 else ""
        yield f"[red]does not fit[/] {amount}({hbm['peak']:.2f} of {hbm['limit']:.2f})"
    if step["total"] is not None:
        yield (
            f"[bold]{step['total']:.3f} s per step[/], {plan['seconds_total']:.1f} s for the whole run of {plan['steps']} steps,"
            f" MFU {plan['mfu']:.1%}; compiled in {plan['compile_seconds']:.0f} s"
        )
        yield f"a step is {step_ranges(plan)}"


def _times(plan: dict) -> Iterator[tuple | None]:
    """Rows of name, seconds and share: by kind of operation, then by module, the longest six."""
    step, modules = plan["seconds_per_step"], summed(plan, "by_module")[:6]
    kinds = [(kind, step[kind]) for kind in ("attention", "matmul", "other", "collectives")]
    longest = [(module, seconds) for module, seconds in modules if not math.isclose(seconds, 0, abs_tol=1e-4)]
    for rows in (kinds, longest):
        yield from ((name, f"{seconds:.3f}", f"{seconds / step['total']:.0%}") for name, seconds in rows)
        yield None
