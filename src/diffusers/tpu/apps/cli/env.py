"""`diffusers-tpu env`: facts for a bug report. Without the TPU path it imports neither JAX nor torchax."""

import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console

import diffusers

from ...chips.devices import find_target, why_off
from ...common.config import Environment, read_environment
from .output import table


PACKAGES = ("diffusers", "torch", "torchax", "jax", "jaxlib", "libtpu", "transformers", "accelerate")
VARIABLES = ("DIFFUSERS_TPU", "DIFFUSERS_TPU_DEVICES", "DIFFUSERS_TPU_MESH", "DIFFUSERS_TPU_CACHE")
OF_SEVERAL = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
CUDA_BUILD = """torch is built for CUDA: 3.7 GB that a TPU host does not need. Its CPU build instead:
uv pip uninstall torch $(uv pip freeze | grep -oE '^(nvidia|cuda|triton)[^=]*') && uv pip install torch --torch-backend cpu"""


def run(options, rest: list[str]) -> int:
    facts = gather()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    rows = []
    for group, values in facts.items():
        rows += [("" if number else group, *item) for number, item in enumerate(values.items())] + [None]
    Console().print(table(("", "", ""), rows, 3, show_header=False))
    if torch.version.cuda and facts["chips"]["TPU path"] == "on":
        print(CUDA_BUILD)  # not wrapped, to be copied
    return 0


def gather() -> dict[str, dict[str, str]]:
    """Facts by group: versions, chips, settings, patches."""
    environment = read_environment()
    return {
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}},
        "chips": chips(environment),
        "settings": {
            **{name: os.environ.get(name, "(not set)") for name in VARIABLES},
            **{name: os.environ[name] for name in OF_SEVERAL if name in os.environ},
            "compiled programs": environment.cache_dir or "not kept",
        },
        "patches": patches(),
    }


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def chips(environment: Environment) -> dict[str, str]:
    """What the TPU path would run on, and the mesh it would choose."""
    if (target := find_target(environment)) is None:
        return {"TPU path": f"off: {why_off(environment)}; plain diffusers runs"}
    from ...chips.devices import jax_devices
    from ...chips.mesh import plan_degrees

    count, kind = len(jax_devices(target)), "simulated on the CPU" if target.simulated else str(target)
    guided, single = (",".join(map(str, plan_degrees(count, environment.mesh, n))) for n in (2, 1))
    other = "" if guided == single else f" where a pipeline calls its model once per guidance branch, else {single}"
    return {"TPU path": "on", "chips": f"{count}, {kind}", "default mesh dp,sp,tp": guided + other}


def patches() -> dict[str, str]:
    """Patch number -> subject, of the checkout that this package runs from; for a wheel only the version it was built as."""
    folder = Path(diffusers.__file__).parents[2] / "patches"
    if not (folder / "series").exists():
        return {"applied": f"when diffusers {installed_version('diffusers')} was built"}
    found = {}
    for name in re.findall(r"^[^#\s].*", (folder / "series").read_text(), re.M):
        text = (folder / name).read_text() if (folder / name).exists() else ""
        subject = re.search(r"^Subject: (?:\[PATCH\] )?(.*)", text, re.M)
        found[name.partition("-")[0]] = subject[1] if subject else "missing"
    return found
