"""The TPU compiler asked before renting a TPU: does a model fit a slice, how fast is a step, and why.

    plan(...)     the answer for one model on one slice, from the cache if it was asked before
    Question      what plan and the benchmarks ask
    programs_of   of which programs the answers to questions would be, and by which reader: the same ones, the same figures
    sources()     a digest of our code: an answer is kept for as long as it stays

The room, in the order an answer is made: `published` and `building` (a pipeline without weights), `recording` (what one
run asks of its models), `work` and `meshes` (counts and first guesses), `hlo`, `bundles`, `ici` and `timing` (a compiled
program read), `kept` (what was compiled before), `worker` (all of it, in the compiler's process), `naming` (the programs
alone), `report` (the page). Beside them `ahead`: executables made before a run; `obstacles`: what keeps a model from being compiled.
"""

import hashlib
import importlib.metadata
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ..chips.figures import find_topology
from ..compile.store.disk_cache import DiskCache
from .aot import run_in_child


TIME_LIMIT = 900.0
PACKAGE = Path(__file__).resolve().parents[2]
BENCH = PACKAGE.parents[1] / "examples" / "tpu" / "bench"  # of a checkout; a wheel has none
PLANS = "diffusers.tpu.planner.worker:answer"
SIMULATED = "simulated"  # a topology: this machine's simulated chips
READER = 1  # of figures: counted up by a change that reads other figures from the same programs


@dataclass(frozen=True)
class Question:
    """A question to the compiler's process.

    Attributes:
        function, request: as `aot.run_in_child` takes them.
        seconds: the process is stopped after these.
        schedules: False compiles as a run does, without writing them, for `compile_seconds`; times are worth nothing then.
    """

    function: str
    request: dict
    seconds: float = TIME_LIMIT
    schedules: bool = True

    def answer(self, on_progress: Callable[[str], None] = lambda text: None) -> dict:
        """What it says. Raises ValueError, aot.NoCompiler, aot.ChildError: see `aot.run_in_child`."""
        return remembered(self.function, self.request, self.seconds, on_progress, self.schedules)


def plan(
    model: str,
    topology: str,
    *,
    schedules: bool = True,
    seconds: float = TIME_LIMIT,
    on_progress: Callable[[str], None] = lambda text: None,
    **asked,
) -> dict:
    """The plan of a model on a slice, as `diffusers-tpu plan --json` prints it.

    Args:
        model, topology, asked: see `request_of`.
        schedules, seconds: see `Question`.

    Raises:
        ValueError: what was asked for cannot be; the message says what can.
        aot.NoCompiler, aot.ChildError: see `aot.run_in_child`.
    """
    question = Question(PLANS, request_of(model, topology, **asked), seconds, schedules)
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

    Raises ValueError: what was asked for cannot be; the message says what can.
    """
    devices = None if topology == SIMULATED else find_topology(topology).devices
    if devices is not None and isinstance(mesh, tuple) and math.prod(mesh) != devices:
        raise ValueError(
            f"expected a mesh dp,sp,tp whose product is the {devices} devices of {topology}, got"
            f" {','.join(map(str, mesh))} = {math.prod(mesh)}"
        )
    return {
        "model": os.path.abspath(model) if os.path.isdir(model) else model,
        "topology": topology,
        "mesh": list(mesh) if isinstance(mesh, tuple) else mesh,
        "dtype": dtype,
        "batch": batch,
        "arguments": arguments or {},
        "everything": everything,
        "tiling": tiling,
        "config": config or {},
        "only": only,
        "within": within,
    }


def remembered(
    function: str,
    request: dict,
    seconds: float = TIME_LIMIT,
    on_progress: Callable[[str], None] = lambda text: None,
    schedules: bool = True,
) -> dict:
    """`aot.run_in_child(function, request)`, once: the same question to the same code and versions is read from disk."""
    cache, name = DiskCache.of("plans"), _key(function, request, schedules)
    if (known := cache.find(name)) is not None:
        return known
    cache.check_writable()
    result = run_in_child(function, request, seconds=seconds, schedules=schedules, on_progress=on_progress)
    cache.keep(name, result)
    return result


def _key(function: str, request: dict, schedules: bool) -> str:
    """Changes with the question, with our code, with the packages and with what the model's configuration holds now."""
    digest = hashlib.sha256(json.dumps([function, request, schedules, sources()], sort_keys=True).encode())
    directory = directory_of(request["model"]) if "model" in request else None
    for source in [] if directory is None else sorted(directory.rglob("*.json")):
        digest.update(f"{source.relative_to(directory)}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:32]


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
        try:
            digest.update(f"{name} {importlib.metadata.version(name)}".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    found = [sorted(PACKAGE.glob(pattern)) for pattern in ("tpu/**/*.py", "tpu/**/*.json", "*/**/*_flax.py")]
    for source in (*itertools.chain(*found), *sorted(BENCH.glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def programs_of(
    questions: list[Question], seconds: float = 3600, on_progress: Callable[[str], None] = lambda text: None
) -> list[dict | None]:
    """`programs` and `reader` as an answer to each of these questions would have them, nothing compiled; None if there is none.

    An answer that has the same is the same answer, whatever else of the sources has changed.
    """
    asked = list(
        {json.dumps([q.function, q.request], sort_keys=True): [q.function, q.request] for q in questions}.values()
    )
    request = {"questions": asked}
    found = run_in_child("diffusers.tpu.planner.naming:answer", request, seconds=seconds, on_progress=on_progress)
    named = {json.dumps(question, sort_keys=True): programs for question, programs in zip(asked, found["programs"])}
    return [named[json.dumps([q.function, q.request], sort_keys=True)] for q in questions]
