"""`diffusers-tpu env`: what a bug report needs. Without a TPU path it imports neither JAX nor torchax."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

import diffusers

from ...chips.devices import Target, find_target, why_off
from ...config import Environment, read_environment
from .errors import BadInput, loading


PACKAGES = ("diffusers", "torch", "torchax", "jax", "jaxlib", "libtpu", "transformers", "accelerate")
VARIABLES = ("DIFFUSERS_TPU", "DIFFUSERS_TPU_DEVICES", "DIFFUSERS_TPU_MESH", "DIFFUSERS_TPU_CACHE")
OF_SEVERAL = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def run(options, rest: list[str]) -> int:
    """The command; returns its exit status."""
    if rest:
        raise BadInput(f"expected no further arguments, got {' '.join(rest)}")
    facts = gather()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    table = Table(show_header=False)
    for group, values in facts.items():
        for name, value in values.items():
            table.add_row(group, name, value)
            group = ""
        table.add_section()
    Console().print(table)
    return 0


def gather() -> dict[str, dict[str, str]]:
    """Facts by group: versions, chips, settings, patches."""
    with loading():
        environment = read_environment()
    return {
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}},
        "chips": chips(environment, find_target(environment)),
        "settings": {
            **{name: os.environ.get(name, "(not set)") for name in VARIABLES},
            **{name: os.environ[name] for name in OF_SEVERAL if name in os.environ},
            "compiled programs": environment.cache_dir or "not kept",
        },
        "patches": {name: subject for name, subject in patches()},
    }


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def chips(environment: Environment, target: Target | None) -> dict[str, str]:
    """What the TPU path would run on, and the mesh it would choose."""
    if target is None:
        return {"TPU path": f"off: {why_off(environment)}; plain diffusers runs"}
    from ...chips.devices import jax_devices
    from ...chips.mesh import plan_degrees

    with loading():
        count, kind = len(jax_devices(target)), "simulated on the CPU" if target.simulated else str(target)
        pair, single = (plan_degrees(count, environment.mesh, paired) for paired in (True, False))
    meshes = ",".join(map(str, pair))
    if pair != single:
        meshes += f" where a pipeline calls its model once per guidance branch, else {','.join(map(str, single))}"
    return {"TPU path": "on", "chips": f"{count}, {kind}", "default mesh dp,sp,tp": meshes}


def patches() -> list[tuple[str, str]]:
    """(number, subject) of each patch of the working tree that this package runs from; a wheel has them in its version."""
    folder = Path(diffusers.__file__).parents[2] / "patches"
    if not (folder / "series").exists():
        return [("applied", f"when diffusers {installed_version('diffusers')} was built")]
    names = [line.strip() for line in (folder / "series").read_text().splitlines()]
    names = [name for name in names if name and not name.startswith("#")]
    return [(name.partition("-")[0], _subject(folder / name)) for name in names]


def _subject(patch: Path) -> str:
    lines = patch.read_text().splitlines() if patch.exists() else []
    subjects = [
        line.removeprefix("Subject: ").removeprefix("[PATCH] ") for line in lines if line.startswith("Subject: ")
    ]
    return subjects[0] if subjects else "missing"
