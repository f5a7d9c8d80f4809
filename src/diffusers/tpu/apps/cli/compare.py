"""`diffusers-tpu compare`: upstream's modules and ours side by side, as a table; fails if any row does."""

import dataclasses
import json
import random

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import arguments, session
from .arguments import flag
from .errors import BadInput, calling


OF_A_COMPONENT = ("entry", "form", "attention", "against", "against_dtype", "against_mesh", "against_attention")
OF_A_COMPONENT += ("depth", "report", "debug_nans", "debug_sharding")


def run(options, rest: list[str]) -> int:
    """The command; returns its exit status."""
    for name in OF_A_COMPONENT:
        if getattr(options, name):
            raise BadInput(
                f"expected --component NAME with {flag(name)}, got none; without it whole components are compared"
            )
    if options.planned:
        raise BadInput("expected --trace with --planned, got none: only a trace is with our plans or without")
    target = session.choose_target("auto")
    if target is None:
        raise BadInput("expected the TPU path, got DIFFUSERS_TPU=off; DIFFUSERS_TPU=cpu compares on simulated chips")
    cls = session.pipeline_class(options.model)
    given = arguments.given_arguments(options, rest)
    call = arguments.call_arguments(cls, given)
    from ... import compare as fidelity

    meshes = [session.mesh_of(mesh, target) for mesh in options.mesh or []] or default_meshes(fidelity.MESHES, target)
    dtypes = [getattr(torch, name) for name in options.dtype or []] or fidelity.DTYPES
    seed = random.randrange(2**31) if options.seed is None else options.seed
    drawn = {**fidelity.draw_arguments(cls, seed), **call}
    rows = []
    with tqdm(total=len(meshes) * len(dtypes), desc="compare", unit="mesh") as bar, calling():
        for group in fidelity.compare_each(options.model, meshes, dtypes, call, seed):
            rows += group
            bar.update()
    said = {
        name: value for name, value in drawn.items() if isinstance(value, (int, float, str)) and name != "output_type"
    }
    if options.json:
        print(json.dumps({"seed": seed, "arguments": said, "rows": [as_dict(row) for row in rows]}, indent=2))
    else:
        console = Console()
        console.print(as_table(rows))
        console.print(f"inputs: seed {seed}, " + ", ".join(f"{n} {v!r}" for n, v in said.items()), soft_wrap=True)
        console.print(f"{sum(row.ok for row in rows)} of {len(rows)} rows within their limits", soft_wrap=True)
    return 0 if all(row.ok for row in rows) else 1


def default_meshes(meshes, target) -> list[tuple[int, int, int]]:
    """Those of `meshes` that fit the chips."""
    from ...chips.devices import jax_devices

    chips = len(jax_devices(target))
    return [mesh for mesh in meshes if mesh[0] * mesh[1] * mesh[2] <= chips]


def as_dict(row) -> dict:
    return {**dataclasses.asdict(row), "ok": row.ok}


def as_table(rows) -> Table:
    """One line a module, entry, dtype and mesh."""
    table = Table(title="relative error against upstream in float32", title_justify="left")
    for name in ("module", "dtype", "dp,sp,tp"):
        table.add_column(name, no_wrap=True)
    for name in ("ours", "upstream", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, (row.dtype, row.mesh)):
            table.add_section()
        before = row.dtype, row.mesh
        name = row.module if row.entry == "forward" else f"{row.module}.{row.entry}"
        upstream = "" if row.upstream_error is None else f"{row.upstream_error:.1e}"
        table.add_row(
            name,
            row.dtype,
            ",".join(map(str, row.mesh)),
            f"{row.error:.1e}",
            upstream,
            f"{row.limit:.1e}",
            "[green]ok[/]" if row.ok else "[bold red]too far[/]",
        )
    return table
