"""`diffusers-tpu plan`: does a model fit a slice, how fast is a step, and why."""

import math
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ... import planner
from ...chips.figures import find_topology
from ...config import parse_mesh
from ...planner.aot import ChildError, NoCompiler
from ...planner.report import step_ranges
from .arguments import given_arguments
from .choices import PLAN_ARGUMENTS
from .errors import BadInput, one_line
from .output import check_writable, write_json


def run(options, rest: list[str]) -> int:
    """Run the command; exit status 1 if the model fits none of the slices that were named."""
    names = [name for word in options.topology for name in word.split(",") if name]
    try:
        topologies = [find_topology(name).name for name in names]
        mesh = options.mesh if options.mesh in (None, "auto") else parse_mesh(options.mesh)
    except ValueError as error:
        raise BadInput(one_line(error)) from error
    if options.batch < 1:
        raise BadInput(f"expected --batch of at least 1, got {options.batch}")
    if options.report:
        check_writable(options.report, ".html")
    if options.json and options.json != "-":
        check_writable(options.json, ".json")
    arguments = {name: number(name, words) for name, words in given_arguments(options, rest, PLAN_ARGUMENTS).items()}
    console = Console(stderr=options.json == "-")
    plans = []
    for topology in topologies:
        plans.append(_plan(options, topology, mesh, arguments))
        if options.json != "-":
            _show(plans[-1], console)
    if options.json:
        write_json(options.json, plans[0] if len(plans) == 1 else plans)
        if options.json != "-":
            console.print(f"wrote {options.json}", soft_wrap=True)
    if options.report:
        from ...planner import report

        report.write(plans, Path(options.report))
        console.print(f"wrote {options.report}", soft_wrap=True)
    return 0 if any(plan["fits"] for plan in plans) else 1


def _plan(options, topology: str, mesh, arguments: dict) -> dict:
    quiet = Console(stderr=True)
    with quiet.status(f"asking the compiler about {topology}") as status:
        try:
            return planner.plan(
                options.model,
                topology,
                mesh=mesh,
                dtype=options.dtype,
                batch=options.batch,
                arguments=arguments,
                everything=options.everything,
                tiling=options.tiling,
                config={} if options.attention == "auto" else {"attention": options.attention},
                seconds=options.time_limit,
                on_progress=status.update,
            )
        except (ValueError, NoCompiler) as error:
            raise BadInput(one_line(error)) from error
        except ChildError as error:
            print(f"diffusers-tpu: {error}", file=sys.stderr)
            raise SystemExit(1) from error


def number(name: str, words: list[str]):
    """The value of an argument of the pipeline: a number where it reads as one, else the word itself."""
    if len(words) != 1:
        raise BadInput(f"expected --{name.replace('_', '-')} once with a value, got {words}")
    for kind in (int, float):
        try:
            return kind(words[0])
        except ValueError:
            continue
    return words[0]


def _show(plan: dict, console: Console):
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in plan["mesh"].items())
    hbm, step = plan["hbm_gib_per_chip"], plan["seconds_per_step"]
    console.print(f"[bold]{plan['model']}[/] compiled for [bold]{plan['topology']}[/], mesh {mesh}", soft_wrap=True)
    over = hbm["peak"] - hbm["limit"]
    if plan["fits"]:
        console.print(f"[green]fits[/]: {hbm['peak']:.2f} of {hbm['limit']:.2f} GiB per chip")
    else:
        amount = f"by {over:.2f} GiB per chip " if over > 0 else ""
        console.print(f"[red]does not fit[/] {amount}({hbm['peak']:.2f} of {hbm['limit']:.2f})", soft_wrap=True)
    if step["total"] is not None:
        console.print(
            f"[bold]{step['total']:.3f} s per step[/], {plan['seconds_total']:.1f} s for the whole run of {plan['steps']} steps,"
            f" MFU {plan['mfu']:.1%}; compiled in {plan['compile_seconds']:.0f} s",
            soft_wrap=True,
        )
        console.print(f"a step is {step_ranges(plan)}", soft_wrap=True)
    console.print(_parts(plan), _kinds(plan) if step["total"] is not None else "")
    for text in plan["ranking"]:
        shape = ",".join(str(degree) for degree in text["mesh"].values())
        exact = "" if text["seconds_per_step"] is None else f", compiled {text['seconds_per_step']:.3f} s"
        console.print(
            f"mesh {shape}: guessed {text['guessed_seconds_per_step']:.3f} s per step{exact}", soft_wrap=True
        )
    for note in plan["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
    for advice in plan["advice"]:
        console.print(f"[bold]what would fit[/]: {advice}", soft_wrap=True)
    console.print("Compiled, not measured: see examples/tpu/PLANNING.md for how near the sum comes to hardware.\n")


def _parts(plan: dict) -> Table:
    table = Table(
        "part", "how", "runs", "s each", "weights", "activations", "TFLOP", title="per chip", title_justify="left"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for part in plan["parts"]:
        branches = " x2" if part["branches"] == 2 else ""
        seconds = "-" if part["seconds"] is None else f"{part['seconds']:.3f}"
        hbm = part["hbm_gib"]
        table.add_row(
            f"{part['component']}.{part['entry']}{branches}",
            part["how"],
            str(part["runs"]),
            seconds,
            f"{hbm['weights']:.2f}",
            f"{hbm['activations']:.2f}",
            f"{part['flops'] / 1e12:.4g}",
        )
    return table


def _kinds(plan: dict) -> Table:
    step = plan["seconds_per_step"]
    table = Table("a step", "seconds", "share", title="where the time goes", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind in ("attention", "matmul", "other", "collectives"):
        table.add_row(kind, f"{step[kind]:.3f}", f"{step[kind] / step['total']:.0%}")
    modules: dict[str, float] = {}
    for part in plan["parts"]:
        for module, seconds in (part["timing"] or {"by_module": {}})["by_module"].items():
            if part["stage"] == "denoise":
                modules[module] = modules.get(module, 0) + seconds * part["runs"] / plan["steps"]
    table.add_section()
    for module, seconds in sorted(modules.items(), key=lambda item: -item[1])[:6]:
        if not math.isclose(seconds, 0, abs_tol=1e-4):
            table.add_row(module, f"{seconds:.3f}", f"{seconds / step['total']:.0%}")
    return table
