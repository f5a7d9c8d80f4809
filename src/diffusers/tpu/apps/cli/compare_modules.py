"""`diffusers-tpu compare --component`: one component in two forms, submodule by submodule, and where they part."""

import json
import math
import random

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from . import arguments, session
from .arguments import flag
from .errors import BadInput, calling
from .output import check_writable, whole_file


DEPTH = 2


def run(options, rest: list[str]) -> int:
    """The command; exit status 1 if a submodule parts, or gives what is not finite."""
    target = session.choose_target("auto")
    if target is None:
        raise BadInput("expected the TPU path, got DIFFUSERS_TPU=off; DIFFUSERS_TPU=cpu compares on simulated chips")
    if options.planned:
        raise BadInput("expected --trace with --planned, got none: only a trace is with our plans or without")
    for name in ("mesh", "dtype"):
        if len(getattr(options, name) or []) > 1:
            raise BadInput(f"expected {flag(name)} once with --component, got {getattr(options, name)}")
    cls = session.pipeline_class(options.model)
    given = arguments.given_arguments(options, rest)
    call = arguments.call_arguments(cls, given)
    if options.report:
        check_writable(options.report, ".html")
    from ... import compare as fidelity

    seed = random.randrange(2**31) if options.seed is None else options.seed
    ours = (options.dtype or [None])[0], (options.mesh or [None])[0], options.attention
    theirs = options.against_dtype, options.against_mesh, options.against_attention
    with calling():
        form = _form(options.form or "scanned", *ours, target)
        against = _form(options.against or "upstream", *theirs, target)
        found = fidelity.compare_component(options.model, options.component, form, against, options.entry, call, seed)
        found = [*found]
    if options.json:
        print(json.dumps({"seed": seed, "comparisons": [comparison.as_dict() for comparison in found]}, indent=2))
    else:
        console = Console()
        for comparison in found:
            show(comparison, options, console)
        console.print(f"inputs: seed {seed}", soft_wrap=True)
    if options.report:
        from ...compare.page import page

        with whole_file(options.report, ".html") as draft:
            draft.write_text(page(options.model, found), encoding="utf-8")
        Console(stderr=options.json).print(f"wrote {options.report}", soft_wrap=True)
    return 0 if all(comparison.ok for comparison in found) else 1


def _form(kind: str, dtype: str | None, mesh: str | None, attention: str | None, target):
    from ...compare import Form

    mesh = session.mesh_of(mesh, target) or (1, 1, 1)
    return Form(kind, getattr(torch, dtype or "float32"), mesh, attention or "auto")


def show(comparison, options, console: Console):
    """The tables of one comparison, and what they come to."""
    depth = DEPTH if options.depth is None else options.depth
    shown = [row for row in comparison.rows if not row.ok or (row.name.count(".") < depth)]
    console.print(_errors(comparison, shown))
    if options.debug_sharding:
        console.print(_shardings(comparison))
    hidden = len(comparison.rows) - len(shown)
    if hidden:
        console.print(
            f"{hidden} more submodules, deeper and within their limits: --depth, --report or --json show them",
            soft_wrap=True,
        )
    reasons: dict[str, list[str]] = {}
    for name, reason in comparison.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        console.print(
            f"not compared: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}: {reason}",
            soft_wrap=True,
            markup=False,
        )
    if comparison.first is not None:
        console.print(f"[bold red]parts first[/]: {called(comparison, comparison.first)}", soft_wrap=True)
    else:
        console.print(f"{len(comparison.rows)} submodules, none parts by itself", soft_wrap=True)
    if options.debug_nans or comparison.not_finite is not None:
        where = "none" if comparison.not_finite is None else called(comparison, comparison.not_finite)
        console.print(f"first NaN or infinity: {where}", soft_wrap=True)


def called(comparison, name: str) -> str:
    """A submodule's name behind its component's."""
    return f"{comparison.component}.{name}" if name else comparison.component


def _errors(comparison, rows) -> Table:
    title = f"{comparison.component}.{comparison.entry}: {comparison.form} against {comparison.against}"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("submodule", overflow="fold", min_width=20)
    for name in ("mean", "max", "relative", "cosine", "growth", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        e = row.error
        verdict = row.grade if row.ok else f"[bold red]{row.grade}[/]"
        growth = "" if row.growth is None or not math.isfinite(row.growth) else f"x{row.growth:.2g}"
        numbers = [f"{x:.1e}" for x in (e.mean, e.maximum, e.relative)]
        numbers += [f"{e.cosine:.5f}", growth, f"{row.limit:.1e}"]
        table.add_row(row.name or f"({comparison.component})", *numbers, verdict)
    return table


def _shardings(comparison) -> Table:
    table = Table(title="how values lie", title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("submodule", overflow="fold", min_width=20)
    for name in ("shape", "spec", "chips"):
        table.add_column(name, no_wrap=True)
    for row in comparison.rows:
        shape = ", ".join(map(str, row.shape))
        table.add_row(row.name or f"({comparison.component})", shape, row.spec or "host", str(row.chips))
    return table
