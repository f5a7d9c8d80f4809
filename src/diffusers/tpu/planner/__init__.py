"""The TPU compiler asked before renting a TPU: does a model fit a slice, how fast is a step, and why.

`published` and `building` make a pipeline without weights, `recording` its calls; `work` and `meshes` estimate them. `hlo`,
`bundles`, `ici` and `timing` read compiled programs, `kept` caches them. `worker` makes a plan in the compiler's process, with
`runs`, `advice` and `measured` rates; `report` prints it. `ahead` compiles executables before a run, `profile` reads a traced run.
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
SIMULATED = "simulated"  # the topology of this machine's simulated chips
READER = 3  # version of the readers: raised by a change that reads other figures from the same programs


@dataclass(frozen=True)
class Question:
    """A request to the compiler's process. `function` and `request` are the first two arguments of `aot.run_in_child`."""

    function: str
    request: dict
    seconds: float = TIME_LIMIT  # time limit, at which the process is killed
    schedules: bool = True  # False: compiles as a run does, for `compile_seconds`; other times are invalid

    def answer(self, on_progress: Callable[[str], None] = lambda text: None) -> dict:
        """The child's result, cached on disk for the same request, code and versions. Raises as `aot.run_in_child`."""
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
        """The cache key: a digest of the request, the compiler's flags, our code, the packages' versions and the model's files."""
        flags = os.environ.get("LIBTPU_INIT_ARGS", "")
        said = json.dumps([self.function, self.request, self.schedules, sources(), flags], sort_keys=True)
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

    Raises as `request_of` and `aot.run_in_child`.
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
    """The request for a plan, which goes to the compiler's process as JSON.

    Args:
        model: a directory, a model in the hub's cache, or a published model's id or short name.
        topology: a name of `figures.TOPOLOGIES`; for executables also SIMULATED.
        mesh: degrees dp, sp, tp; None: the pipeline's own choice; "auto": the fastest that fits, of several compiled.
        batch: number of prompts.
        arguments: of the pipeline's call; others have the model card's value or the pipeline's default.
        everything: compile all components; False: only the denoiser, and model the others (a VAE takes the compiler minutes).
        tiling: whether the VAE works in tiles; None: as in the model card's script.
        config: further fields of `TPUConfig`.
        only: names of components; None: all.
        within: "module:name" of a context manager in which programs are traced, for benchmarks; None: none.
        measured: rates of a report of `diffusers-tpu check`, as `measured.read_rates` reads them; None: published ones.
        train: "lora" or "full": plan one training step of the denoiser, forward and backward, instead of a run.

    Raises ValueError for an unknown topology, or a mesh whose product is not its number of devices.
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
    """The folder of a model's configuration: a directory, or one in the hub's cache, also for "MODEL@PIPELINE"; None: neither."""
    if Path(model).is_dir():
        return Path(model)
    if "@" in model:
        return directory_of(model.rpartition("@")[0])
    try:
        return Path(snapshot_download(model, local_files_only=True, allow_patterns="*.json"))
    except (LocalEntryNotFoundError, ValueError, OSError):  # not cached, or not in the form of an id
        return None


def sources() -> str:
    """A digest of our code and of the packages' versions, on which every plan depends. A plan's `versions` include it."""
    digest = hashlib.sha256()
    for name in ("torch", "torchax", "jax", "jaxlib", "libtpu", "transformers", "flax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)}".encode())
    ours = [path for kind in ("tpu/**/*.py", "tpu/**/*.json", "*/**/*_flax.py") for path in sorted(PACKAGE.glob(kind))]
    for source in (*ours, *sorted((EXAMPLES / "bench").glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
