"""The TPU compiler asked before renting a TPU: does a model fit a slice, how fast is a step, and why.

A plan is made by `published` and `building` (a pipeline without weights), `recording` (its calls), `work` and `meshes` (counts, guesses),
`hlo`, `bundles`, `ici`, `timing` (compiled programs read), `kept`, `runs`, `advice`, `worker` (all of it, in the compiler's process) and
`report`. `measured`: rates of a TPU in place of published ones. Beside them `ahead`: executables before a run; `profile`: a traced run.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ..chips.figures import find_topology
from ..common.files import EXAMPLES, PACKAGE
from ..compile.store.disk_cache import DiskCache
from .aot import run_in_child


TIME_LIMIT = 900.0
PLANS = "diffusers.tpu.planner.worker:answer"
SIMULATED = "simulated"  # a topology: this machine's simulated chips
READER = 3  # of figures: counted up by a change that reads other figures from the same programs


@dataclass(frozen=True)
class Question:
    """A question to the compiler's process: `function` and `request` as `aot.run_in_child` takes them."""

    function: str
    request: dict
    seconds: float = TIME_LIMIT  # the process is stopped after these
    schedules: bool = True  # False compiles as a run does, for `compile_seconds`; times are worth nothing then

    def answer(self, on_progress: Callable[[str], None] = lambda text: None) -> dict:
        """From disk if the same code and versions were asked before. Raises as `aot.run_in_child`."""
        cache, name = DiskCache.of("plans"), self._key()
        if (known := cache.find(name)) is not None:
            return known
        cache.check_writable()
        result = run_in_child(
            self.function, self.request, seconds=self.seconds, schedules=self.schedules, on_progress=on_progress
        )
        cache.keep(name, result)
        return result

    def _key(self) -> str:
        """Changes with the question, our code, the packages and what the model's configuration holds now."""
        said = json.dumps([self.function, self.request, self.schedules, sources()], sort_keys=True)
        digest = hashlib.sha256(said.encode())
        directory = directory_of(self.request["model"]) if "model" in self.request else None
        for source in [] if directory is None else sorted(directory.rglob("*.json")):
            digest.update(f"{source.relative_to(directory)}\n".encode() + source.read_bytes())
        return digest.hexdigest()[:32]


def plan(
    model: str,
    topology: str,
    *,
    seconds: float = TIME_LIMIT,
    on_progress: Callable[[str], None] = lambda text: None,
    **asked,
) -> dict:
    """The plan of a model on a slice, as `diffusers-tpu plan --json` prints it. Arguments: see `request_of` and `Question`.

    Raises ValueError for what cannot be; else as `aot.run_in_child`.
    """
    question = Question(PLANS, request_of(model, topology, **asked), seconds)
    return {**question.answer(on_progress), "model": model}


def request_of(
    model: str,
    topology: str,
    *,
    mesh: str | tuple[int, int, int] | None = None,
    dtype: str = "bfloat16",
    batch: int = 1,
    arguments: dict | None = None,
    everything: bool = False,
    tiling: bool | None = None,
    config: dict | None = None,
    only: list[str] | None = None,
    within: str | None = None,
    measured: dict | None = None,
    train: str | None = None,
) -> dict:
    """What is asked for a plan.

    Args:
        model: a directory, a model in the hub's cache, or a published model's id or short name.
        topology: a name of `figures.TOPOLOGIES`; for executables also SIMULATED.
        mesh: degrees dp, sp, tp; None: what the pipeline chooses itself; "auto": the best of several.
        batch: prompts at once.
        arguments: of the pipeline's call; what is left out is the model card's or the pipeline's default.
        everything: compile also what is not the denoiser, instead of modelling it (a VAE takes the compiler minutes).
        tiling: the VAE works in tiles; None: as the model card's script says.
        config: further fields of `TPUConfig`.
        only: names of components; None: all.
        within: "module:name" of a context manager that programs are traced in, for benchmarks; None: of none.
        measured: rates of a report of `diffusers-tpu check`, as `measured.read_rates` reads them; None: published ones.
        train: "lora" or "full": a step of training the denoiser, there and back, in place of a run.

    Raises ValueError: what was asked for cannot be; the message says what can.
    """
    request = dict(locals())
    devices = None if topology == SIMULATED else find_topology(topology).devices
    if devices is not None and isinstance(mesh, tuple) and math.prod(mesh) != devices:
        raise ValueError(
            f"expected a mesh dp,sp,tp whose product is the {devices} devices of {topology}, got"
            f" {','.join(map(str, mesh))} = {math.prod(mesh)}"
        )
    model = os.path.abspath(model) if os.path.isdir(model) else model
    mesh = list(mesh) if isinstance(mesh, tuple) else mesh
    return {**request, "model": model, "mesh": mesh, "arguments": arguments or {}, "config": config or {}}


def directory_of(model: str) -> Path | None:
    """Where the configuration of a directory or of a model in the hub's cache lies, "MODEL@PIPELINE" too; None: it has none."""
    if Path(model).is_dir():
        return Path(model)
    if "@" in model:
        return directory_of(model.rpartition("@")[0])
    try:
        return Path(snapshot_download(model, local_files_only=True, allow_patterns="*.json"))
    except (LocalEntryNotFoundError, ValueError, OSError):  # not cached, or not the form of an id
        return None


def sources() -> str:
    """A digest of our code and of the versions of the packages: what an answer is made by. It stands among `versions`."""
    digest = hashlib.sha256()
    for name in ("torch", "torchax", "jax", "jaxlib", "libtpu", "transformers", "flax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)}".encode())
    ours = [path for kind in ("tpu/**/*.py", "tpu/**/*.json", "*/**/*_flax.py") for path in sorted(PACKAGE.glob(kind))]
    for source in (*ours, *sorted((EXAMPLES / "bench").glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
