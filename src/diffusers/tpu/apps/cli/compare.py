"""`diffusers-tpu compare`: compares our modules with upstream's; with --component one of them, submodule by submodule."""

import dataclasses
import json
import math
import os

import torch
from rich.console import Console
from tqdm import tqdm

from . import session
from .arguments import flag, numbers
from .errors import from_checkout
from .output import say, table


def run(options, rest: list[str]) -> int:
    """Run the command; exit status 1 if a row fails: an error above its limit, or an output that is not finite."""
    for name in ("mesh", "dtype"):
        if options.component and len(getattr(options, name) or []) > 1:
            raise ValueError(f"expected {flag(name)} once with --component, got {getattr(options, name)}")
    if (target := session.choose_target("auto")) is None:
        raise ValueError("expected the TPU path, got DIFFUSERS_TPU=off; DIFFUSERS_TPU=cpu compares on simulated chips")
    cls, call = session.asked(options, rest)
    seed = session.seed_of(options.seed)
    if options.component:
        return from_checkout("submodules.command").run(options, target, call, seed)
    return _modules(options, target, cls, call, seed)


def _modules(options, target, cls: type, call: dict, seed: int) -> int:
    from ...chips.devices import jax_devices
    from ...compare import pipelines

    chips = len(jax_devices(target))
    meshes = [session.mesh_of(mesh, target) for mesh in options.mesh or []]
    meshes = meshes or [mesh for mesh in pipelines.MESHES if math.prod(mesh) <= chips]
    dtypes = [getattr(torch, name) for name in options.dtype or []] or pipelines.DTYPES
    drawn = {**pipelines.draw_arguments(cls, seed), **call}
    said = {n: v for n, v in drawn.items() if isinstance(v, (int, float, str)) and n != "output_type"}
    each = pipelines.compare_each(options.model, meshes, dtypes, drawn, seed)
    groups = [*tqdm(each, "compare", len(meshes) * len(dtypes), unit="mesh")]
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
    """One line for each module, entry, dtype and mesh."""
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


def trace(options, rest: list[str]) -> int:
    """Run `--trace`; exit status 1 if something cannot be compiled, or a trace was not completed."""
    if len(options.dtype or []) > 1:
        raise ValueError(f"expected --dtype once with --trace, got {options.dtype}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # leaves this machine's TPU free
    return from_checkout("submodules.trace_command").run(options, numbers(options, rest))
