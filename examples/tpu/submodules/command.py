"""`diffusers-tpu compare --component`: prints its tables and their summary."""

import json
import math
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console

from diffusers.tpu.apps.cli import session
from diffusers.tpu.apps.cli.output import say, table
from diffusers.tpu.common.files import write_whole

from .forms import Form
from .modules import compare_component
from .page import page


DEPTH = 2
NARROW = {"box": SIMPLE, "pad_edge": False, "collapse_padding": True}


def run(options, target, call: dict, seed: int) -> int:
    """Runs the command; returns exit status 1 if a submodule is above its limit or returns NaN or infinities."""

    def form(kind: str, dtype: str | None, mesh: str | None, attention: str | None):
        mesh = session.mesh_of(mesh, target) or (1, 1, 1)
        return Form(kind, getattr(torch, dtype or "float32"), mesh, attention or "auto")

    dtype, mesh = ((given or [None])[0] for given in (options.dtype, options.mesh))
    ours = form(options.form or "scanned", dtype, mesh, options.attention)
    against = options.against_dtype, options.against_mesh, options.against_attention
    theirs = form(options.against or "upstream", *against)
    found = [*compare_component(options.model, options.component, ours, theirs, options.entry, call, seed)]
    if options.json:
        print(json.dumps({"seed": seed, "comparisons": [comparison.as_dict() for comparison in found]}, indent=2))
    else:
        for comparison in found:
            show(comparison, options)
        say(f"inputs: seed {seed}")
    if options.report:
        write_whole(Path(options.report), page(options.model, found))
        say(f"wrote {options.report}", stderr=options.json)
    return 0 if all(comparison.ok for comparison in found) else 1


def show(comparison, options):
    """Prints the tables of one comparison and their summary."""
    depth = DEPTH if options.depth is None else options.depth
    shown = [row for row in comparison.rows if not row.ok or (row.name.count(".") < depth)]
    Console().print(_errors(comparison, shown))
    if options.debug_sharding:
        Console().print(_shardings(comparison))
    hidden = len(comparison.rows) - len(shown)
    if hidden:
        say(f"{hidden} more submodules, deeper and within their limits: --depth, --report or --json show them")
    reasons: dict[str, list[str]] = {}
    for name, reason in comparison.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        say(f"not compared: {', '.join(names[:4])}{more}: {reason}")

    first, not_finite = (
        "none" if name is None else f"{comparison.component}.{name}".rstrip(".")
        for name in (comparison.first, comparison.not_finite)
    )
    parts = f"{len(comparison.rows)} submodules, none parts by itself"
    say(parts if comparison.first is None else f"[bold red]parts first[/]: {first}", markup=True)
    if options.debug_nans or comparison.not_finite is not None:
        say(f"first NaN or infinity: {not_finite}")


def _errors(comparison, rows):
    lines = []
    for row in rows:
        e = row.error
        verdict = row.grade if row.ok else f"[bold red]{row.grade}[/]"
        growth = "" if row.growth is None or not math.isfinite(row.growth) else f"x{row.growth:.2g}"
        numbers = [f"{x:.1e}" for x in (e.mean, e.maximum, e.relative)]
        numbers += [f"{e.cosine:.5f}", growth, f"{row.limit:.1e}"]
        lines.append((row.name or f"({comparison.component})", *numbers, verdict))
    title = f"{comparison.component}.{comparison.entry}: {comparison.form} against {comparison.against}"
    names = ("submodule", "mean", "max", "relative", "cosine", "growth", "limit", "")
    return table(names, lines, wrap=False, title=title, **NARROW)


def _shardings(comparison):
    lines = (
        (row.name or f"({comparison.component})", ", ".join(map(str, row.shape)), row.spec or "host", row.chips)
        for row in comparison.rows
    )
    return table(("submodule", "shape", "spec", "chips"), lines, 4, wrap=False, title="how values lie", **NARROW)
