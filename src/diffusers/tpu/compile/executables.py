"""Executables of a module's programs on disk, which other processes load without tracing.

The key is everything that the trace read, as strings (`store`). A trace's guards are stored too, by the guard values before them,
and marks of what the trace found. If a process of a run does not find a program, all compile it. Not cached: programs with host
callbacks (`TPUConfig.attention_tally`), and those of code without a stable key (a script's).
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import platform
import sys
import threading
import weakref
from pathlib import Path

import jax
from jax import export
from jax.experimental import serialize_executable

from ...utils import logging
from .. import bridge
from ..chips import hosts
from ..chips.devices import flags_of_jax
from ..chips.mesh import regrouped
from ..common import notices
from .call import Call, values_of
from .lru import LRUCache
from .programs import Program
from .state import process_key
from .store.disk_cache import DiskCache
from .store.keys import Key, StableKey
from .store.sources import NotPortable, digest, library_words, our_words


logger = logging.get_logger(__name__)

VERSIONS = ("torch", "torchax", "jax", "jaxlib", "libtpu", "transformers", "peft", "numpy")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
OF_JAX = (
    "jax_enable_x64 jax_default_matmul_precision jax_threefry_partitionable jax_numpy_dtype_promotion"
    " jax_use_shardy_partitioner jax_exec_time_optimization_effort jax_memory_fitting_effort"
).split()
GUARDS_ON = ("cpu", "tpu")  # a guard runs on a chip where JAX_PLATFORMS leaves out the CPU
MOST_AHEAD = 4  # programs of a module that are prefetched
NUMBERS_ARE_READ, ALONE = "numbers are read", "alone"
_loaded: "weakref.WeakValueDictionary[str, jax.stages.Compiled]" = weakref.WeakValueDictionary()
_loading: "collections.defaultdict[str, threading.Lock]" = collections.defaultdict(threading.Lock)


class Executables:
    """The cached executables of one runner. `reason`: why programs of the module as it is are not cached, if they are not. `off`:
    nothing is looked up or cached, as the caller needs the trace. `ahead`: programs that are being prefetched, by name."""

    def __init__(self, runner):
        self.runner, self.off = runner, False
        self.name = type(runner.module).__name__
        self.ahead: dict[str, concurrent.futures.Future] = {}
        self.reason: str | None = None
        self._of_modules: dict[object, tuple[dict[str, str] | None, str | None]] = LRUCache(runner.config.programs)
        self._compared = False

    @property
    def cache(self) -> DiskCache:
        off = self.off or self.runner.config.attention_tally
        return DiskCache("executables", None) if off else DiskCache.of("executables")

    def key(self, call: Call, branches: int, guards: tuple) -> Key | None:
        """The program's cache key; None: it is not cached."""
        if (of_module := self._of_module()) is None:
            return None
        entry, spec, static, *step, shapes = call.key
        words = StableKey()
        try:
            of_call = {
                "call": f"{entry} {words.of(spec)} {words.of(static)}",
                "shapes": repr([(shape, bridge.numpy_dtype(dtype).name) for shape, dtype in shapes]),
                "batch": f"{call.batch} {call.batched}",
                "cache": words.of(tuple(step)),
                "branches": str(branches),
                "guards": words.of(guards),
            }
        except NotPortable as error:
            logger.info(f"the program of {self.name}.{entry} is not kept: {error}")
            return None
        return Key(self.name, of_module, of_call)

    def _of_module(self) -> dict[str, str] | None:
        if self.cache.folder is None:
            return None
        state = self.runner.state_key
        if state not in self._of_modules:
            try:
                self._of_modules[state] = module_words(self.runner), None
            except Exception as error:  # NotPortable, or an object's own error: it runs uncached
                self._of_modules[state] = None, str(error) or repr(error)
                logger.info(f"programs of {self.name} are not kept for other processes: {error}")
        words, self.reason = self._of_modules[state]
        return words

    def expect(self):
        """Prefetch the most recently used executables of the module as it is, while its weights are being placed."""
        self.runner.current()
        if (of_module := self._of_module()) is None:
            return
        keys = Key(self.name, of_module, {}).family_in(self.cache)[:MOST_AHEAD]
        if keys := [key for key in keys if key.name not in self.ahead and key.name not in _loaded]:
            pool = concurrent.futures.ThreadPoolExecutor(2, "diffusers-tpu-executables")
            self.ahead |= {key.name: pool.submit(self._find, key) for key in keys}
            pool.shutdown(wait=False)  # its threads end with their work

    def recall(self, key: Key | None, call: Call) -> "Program | bridge.Guard | str | None":
        """The cached program, guard or mark for this key; None unless all processes of the run find it."""
        found = None
        if key is not None:
            loading = self.ahead.pop(key.name, None)
            found = self._find(key) if loading is None else loading.result()
            if found is None and not (self.runner.within or self._compared):
                self._say_what_differs(key)
            self._compared = True
        kind = found if isinstance(found, str) else type(found).__name__
        return found if hosts.same(f"what is kept of {self.name}.{call.entry} for {call.shapes}", kind) else None

    def _find(self, key: Key):
        """The cached value for this key; the executables of a program are loaded."""
        found = self.cache.find(key.name, key.parts)
        try:
            if isinstance(found, bridge.Guard):
                function = export.deserialize(bytearray(found.compute))
                return dataclasses.replace(found, compute=jax.jit(function.call))
            if isinstance(found, Program):
                found.mesh = regrouped(self.runner.mesh, found.mesh)
                devices, load = [*found.mesh.devices.flat], serialize_executable.deserialize_and_load
                for part, serialized in found.executables.items():
                    name = key.name + part
                    with _loading[name]:  # two experts have one, and each a thread that looks for it
                        if (compiled := _loaded.get(name)) is None:
                            compiled = load(*serialized, devices[0].client, devices)
                        found.executables[part] = _loaded[name] = compiled
                if found.differentiable is not None:
                    found.differentiable.program = found
            return found
        except Exception as error:  # whatever the runtime raises, the program can be compiled
            return self.cache.remove(key.name, error)

    def _say_what_differs(self, key: Key):
        """Say once per component how the key differs from the nearest cached one; a warning only if that one was compiled ahead."""
        apart, ahead = key.differs(self.cache) or (None, False)
        if ahead:
            notices.warn_once(
                f"ahead {key.model}",
                f"the executable of {key.model} that was made ahead is not used, it is compiled here: what it was made for differs"
                f" in {apart}. Run `diffusers-tpu compile` again for what is here, or run with what it was made for",
            )
        elif apart is not None:
            logger.info(f"{key.model} is compiled: what is kept of it for this call differs in {apart}")

    def keep(self, key: Key | None, make, ahead: bool = False):
        """Write what `make()` returns, or a mark. If the runtime or pickle cannot serialize it, the next process makes its own."""
        if key is None:
            return
        try:
            self.cache.keep(key.name, make if isinstance(make, str) else make(), key.parts, ahead=ahead)
        except Exception as error:
            self.reason = f"it cannot be written down: {error!r:.200}"
            logger.info(f"a program of {self.name} is not kept: {self.reason}")

    def keep_program(self, program: Program, ahead: bool = False):
        """Write a compiled program. `ahead`: it was compiled ahead of a run."""

        def make() -> Program:
            stored = {"mesh": program.mesh.shape["dp"], "options": {}, "calls": 0, "key": None, "recalled": True}
            _loaded.update((program.key.name + part, one) for part, one in program.executables.items())
            executables = {part: serialize_executable.serialize(one) for part, one in program.executables.items()}
            return dataclasses.replace(program, **stored, given=(), traced=None, executables=executables)

        self.keep(program.key, make, ahead)

    def keep_guard(self, key: Key | None, guard: "bridge.Guard", call: Call):
        """Write a guard, under the guard values before it."""

        def make() -> bridge.Guard:
            some = [values_of(call.tensors[number]) for number in guard.inputs]
            given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in some]
            function = export.export(guard.compute, platforms=GUARDS_ON)(*given).serialize()
            return dataclasses.replace(guard, compute=bytes(function))

        self.keep(key, make)


def module_words(runner) -> dict[str, str]:
    """The parts of a key that describe the module as it is, its chips, versions and sources. Raises NotPortable."""
    words, placed, plan, settings = StableKey(), runner.plan_weights(), runner.plan, runner.settings
    weights = [
        (name, a.shape, a.dtype.name, repr(a.sharding.spec), repr(placed.packed.get(name)))
        for name, a in placed.avals.items()
    ]
    fixed = {name: value for name, value in vars(settings).items() if name not in ("mesh", "tally")}
    planned = (
        (plan.activation_spec, plan.batched, plan.replicated, plan.axes, plan.decide, runner.within),
        tuple(plan.processors.items()),
        tuple(plan.methods.items()),
        None if runner.step_cache is None else type(runner.step_cache),
        tuple((group.label, group.path, group.start, group.stop) for group in placed.groups),
    )
    numbers, of_jax = runner.state.numbers(placed), [repr(getattr(jax.config, name, None)) for name in OF_JAX]
    return {
        "state": words.of((runner.state.read, process_key())),
        "weights": repr(sorted(weights)),
        "numbers": repr(sorted((name, n.shape) for name, n in numbers.items())),
        "plan": words.of(planned),
        "settings": repr((fixed, runner.config.matmul_precision)),
        "mesh": f"{_mesh_words(runner.mesh)} {runner.config.regroup}",
        "compiler": repr((sorted(runner.compiler_options.items()), _flags(), of_jax)),
        "versions": _versions(),
        "sources": f"{our_words()} {library_words(runner.state.now.libraries)}",
    }


def _mesh_words(mesh) -> str:
    devices = [*mesh.devices.flat]
    where = [(d.id, *(getattr(d, "coords", None) or ()), getattr(d, "core_on_chip", 0)) for d in devices]
    parts = [(d.process_index, getattr(d, "slice_index", 0)) for d in devices]
    host = (_processor(), jax.process_index()) if devices[0].platform == "cpu" else ""
    return repr((dict(mesh.shape), devices[0].device_kind, where, parts, host))


@functools.cache
def _processor() -> str:
    """The CPU's architecture and features: XLA compiles for these where the chips are simulated."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {digest(flags.encode())}"


def _flags() -> list[str]:
    """The compiler's flags, without the number of simulated chips (part of the mesh), dumps, and what JAX adds on a TPU host."""
    flags = {*" ".join(os.environ.get(name, "") for name in FLAGS).split()} - flags_of_jax()
    return sorted(flag for flag in flags if "force_host_platform_device_count" not in flag and "dump" not in flag)


@functools.cache
def _versions() -> str:
    found = ["python {}.{}".format(*sys.version_info)]  # patch versions read each other's pickles
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)
