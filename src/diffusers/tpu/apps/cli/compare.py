"""`diffusers-tpu compare`: upstream's modules and ours side by side; with --component one of them, submodule by submodule."""

import dataclasses
import json
import math
import os
import random
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from tqdm import tqdm

from ...files import write_whole
from . import session
from .arguments import flag, numbers
from .errors import PACKAGE, refusing
from .output import check_writable, say, table


DEPTH = 2
NARROW = {"box": SIMPLE, "pad_edge": False, "collapse_padding": True}


def run(options, rest: list[str]) -> int:
    """The command; exit status 1 if a row fails: a module is too far off, a submodule parts or gives what is not finite."""
    for name in ("mesh", "dtype"):
        if options.component and len(getattr(options, name) or []) > 1:
            raise ValueError(f"expected {flag(name)} once with --component, got {getattr(options, name)}")
    target = session.choose_target("auto")
    if target is None:
        raise ValueError("expected the TPU path, got DIFFUSERS_TPU=off; DIFFUSERS_TPU=cpu compares on simulated chips")
    cls, call = session.asked(options, rest)
    check_writable(options.report, ".html")
    seed = random.randrange(2**31) if options.seed is None else options.seed
    return (_submodules if options.component else _modules)(options, target, cls, call, seed)


def _modules(options, target, cls: type, call: dict, seed: int) -> int:
    from ... import compare
    from ...chips.devices import jax_devices

    chips = len(jax_devices(target))
    meshes = [session.mesh_of(mesh, target) for mesh in options.mesh or []]
    meshes = meshes or [mesh for mesh in compare.MESHES if math.prod(mesh) <= chips]
    dtypes = [getattr(torch, name) for name in options.dtype or []] or compare.DTYPES
    drawn = {**compare.draw_arguments(cls, seed), **call}
    said = {n: v for n, v in drawn.items() if isinstance(v, (int, float, str)) and n != "output_type"}
    with tqdm(total=len(meshes) * len(dtypes), desc="compare", unit="mesh") as bar:
        groups = []
        for group in compare.compare_each(options.model, meshes, dtypes, call, seed):
            groups.append(group)
            bar.update()
    rows = [row for group in groups for row in group]
    if options.json:
        found = [{**dataclasses.asdict(row), "ok": row.ok} for row in rows]
        print(json.dumps({"seed": seed, "arguments": said, "rows": found}, indent=2))
    else:
        Console().print(_table(groups))
        say(f"inputs: seed {seed}, " + ", ".join(f"{n} {v!r}" for n, v in said.items()))
        say(f"{sum(row.ok for row in rows)} of {len(rows)} rows within their limits")
    return 0 if all(row.ok for row in rows) else 1


def _table(groups):
    """One line a module, entry, dtype and mesh."""
    lines = []
    for group in groups:
        for row in group:
            name = row.module if row.entry == "forward" else f"{row.module}.{row.entry}"
            upstream = "" if row.upstream_error is None else f"{row.upstream_error:.1e}"
            verdict = "[green]ok[/]" if row.ok else "[bold red]too far[/]"
            mesh = ",".join(map(str, row.mesh))
            lines.append((name, row.dtype, mesh, f"{row.error:.1e}", upstream, f"{row.limit:.1e}", verdict))
        lines.append(None)
    names = ("module", "dtype", "dp,sp,tp", "ours", "upstream", "limit", "")
    return table(names, lines, 3, wrap=False, title="relative error against upstream in float32")


def _submodules(options, target, cls: type, call: dict, seed: int) -> int:
    from ... import compare

    def form(kind: str, dtype: str | None, mesh: str | None, attention: str | None):
        mesh = session.mesh_of(mesh, target) or (1, 1, 1)
        return compare.Form(kind, getattr(torch, dtype or "float32"), mesh, attention or "auto")

    dtype, mesh = ((given or [None])[0] for given in (options.dtype, options.mesh))
    ours = form(options.form or "scanned", dtype, mesh, options.attention)
    against = options.against_dtype, options.against_mesh, options.against_attention
    theirs = form(options.against or "upstream", *against)
    found = [*compare.compare_component(options.model, options.component, ours, theirs, options.entry, call, seed)]
    if options.json:
        print(json.dumps({"seed": seed, "comparisons": [comparison.as_dict() for comparison in found]}, indent=2))
    else:
        for comparison in found:
            show(comparison, options)
        say(f"inputs: seed {seed}")
    if options.report:
        from ...compare.page import page

        write_whole(Path(options.report), page(options.model, found))
        say(f"wrote {options.report}", stderr=options.json)
    return 0 if all(comparison.ok for comparison in found) else 1


def show(comparison, options):
    """The tables of one comparison, and what they come to."""
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


def trace(options, rest: list[str]) -> int:
    """`--trace`; exit status 1 if there is an obstacle to compiling, or a trace did not come to its end."""
    if len(options.dtype or []) > 1:
        raise ValueError(f"expected --dtype once with --trace, got {options.dtype}")
    arguments = numbers(options, rest)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a TPU that is here stays free
    from ...planner.trace_diagnostics import list_obstacles

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
    """A file of an installed package from the package's name on."""
    for root in (PACKAGE.parent, Path(torch.__file__).parents[1]):
        if Path(file).is_relative_to(root):
            return os.path.relpath(file, root)
    return file
