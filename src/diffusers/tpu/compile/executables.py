"""Executables of a module's programs, kept for other processes: a run finds them without tracing.

A program is kept by everything that its trace read, in words (`store`), and with what its trace found out: how its flat output
arrays make up upstream's return value. What a trace asked for of a call's small inputs (`decided`) is kept by the answers so far,
as one more thing that is found: whoever looks for a program is led from question to question, as the trace was.

Of a run of several processes each has a store, or all have one: a program is found where every process finds it, else all compile.

Not kept: programs that call the host back (`TPUConfig.attention_tally`), and those of code that has no words (a script's).
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax import export
from jax.experimental import serialize_executable

from ...utils import logging
from .. import bridge, notices
from ..chips import hosts
from ..chips.devices import flags_of_jax
from . import tracing
from .call import Call, values_of
from .programs import Program
from .recent import Recent
from .state import process_key
from .store.describing import NotPortable, StableKey, ours_in_words, sources_in_words
from .store.disk_cache import DiskCache
from .store.keys import Key


logger = logging.get_logger(__name__)

VERSIONS = ("torch", "torchax", "jax", "jaxlib", "libtpu", "transformers", "numpy")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
OF_JAX = (
    "jax_enable_x64 jax_default_matmul_precision jax_threefry_partitionable jax_numpy_dtype_promotion"
    " jax_use_shardy_partitioner jax_exec_time_optimization_effort jax_memory_fitting_effort"
).split()
ASKED_ON = ("cpu", "tpu")  # questions: on the host, or on a chip where JAX_PLATFORMS leaves the host out
MOST_AHEAD = 4  # programs of a module that are loaded before somebody asks for them
PASSING = ("call", "shapes", "batch", "cache", "branches", "answers")
NUMBERS_ARE_READ, ALONE = "numbers are read", "alone"
_loaded: "weakref.WeakValueDictionary[str, jax.stages.Compiled]" = weakref.WeakValueDictionary()


@dataclass
class CachedExecutable:
    """An executable and what a run needs beside it.

    Attributes:
        executable, in_tree, out_tree: as `jax.experimental.serialize_executable` gives them.
        avals: shapes and dtypes of one call's flat outputs.
        seconds: that its trace and compilation took.
    """

    executable: bytes
    in_tree: object
    out_tree: object
    result: tracing.TraceResult
    avals: list[tuple[tuple[int, ...], str]]
    seconds: float


@dataclass
class CachedGuard:
    """A question of `decided`, its function exported for the host."""

    inputs: tuple[int, ...]
    key: tuple
    line: object
    function: bytes

    def question(self) -> "bridge.Question":
        compute = jax.jit(export.deserialize(bytearray(self.function)).call)
        return bridge.Question(self.inputs, self.key, self.line, compute)


class Executables:
    """Of one runner. `reason`: why programs of the module as it is are not kept, if they are not.

    Attributes:
        ahead: loading before they are asked for, by name.
        off: nothing is found or kept: who asks wants the trace itself.
    """

    def __init__(self, runner):
        self.runner, self.off = runner, False
        self.ahead: dict[str, concurrent.futures.Future] = {}
        self.reason: str | None = None
        self._lasting: dict[object, dict[str, str] | None] = Recent(runner.config.programs)
        self._compared = False

    @property
    def cache(self) -> DiskCache | None:
        """None where nothing is found or kept."""
        cache = None if self.off or self.runner.config.attention_tally else DiskCache.of("executables")
        return cache if cache is not None and cache.folder is not None else None

    def key(self, call: Call, branches: int, answers: tuple) -> Key | None:
        """What the program of this call is kept by; None where it is not kept."""
        if self.cache is None or (lasting := self._lasting_now()) is None:
            return None
        entry, spec, static, *step, shapes = call.key
        words = StableKey()
        try:
            passing = {
                "call": f"{entry} {words.of(spec)} {words.of(static)}",
                "shapes": repr([(shape, bridge.numpy_dtype(dtype).name) for shape, dtype in shapes]),
                "batch": f"{call.batch} {call.batched}",
                "cache": words.of(tuple(step)),
                "branches": str(branches),
                "answers": words.of(answers),
            }
        except NotPortable as error:
            logger.info(f"the program of {self._name}.{entry} is not kept: {error}")
            return None
        return Key(self._name, lasting, passing)

    @property
    def _name(self) -> str:
        return type(self.runner.module).__name__

    def _lasting_now(self) -> dict[str, str] | None:
        state = self.runner.state_key
        if state not in self._lasting:
            try:
                self._lasting[state], self.reason = lasting_words(self.runner), None
            except Exception as error:  # NotPortable, or of an object that has no words: it runs all the same
                self._lasting[state], self.reason = None, str(error) or repr(error)
                logger.info(f"programs of {self._name} are not kept for other processes: {error}")
        return self._lasting[state]

    # Found

    def expect(self):
        """Load what was last used of the module as it is, while its weights are on their way."""
        if self.cache is None:
            return
        self.runner.current()
        if (lasting := self._lasting_now()) is None:
            return
        keys = Key(self._name, lasting, dict.fromkeys(PASSING, "")).beside(self.cache)[:MOST_AHEAD]
        keys = [key for key in keys if key.name not in self.ahead and key.name not in _loaded]
        if keys:
            pool = concurrent.futures.ThreadPoolExecutor(2, "diffusers-tpu-executables")
            self.ahead |= {key.name: pool.submit(self._find, key) for key in keys}
            pool.shutdown(wait=False)  # its threads end with their work

    def forget_expected(self):
        """What nobody asked for is let go of."""
        self.ahead.clear()

    def recall(self, key: Key | None, call: Call, branches: int) -> "Program | bridge.Question | str | None":
        """What is kept for this key: a program, the question that decides which it is, or what a trace found out.

        None where nothing is, or not in all processes of the run: what one of them compiles, all compile.
        """
        found = None if key is None else self._expected(key)
        where = f"what is kept of {self._name}.{call.entry} for {call.shapes}"
        if not hosts.same(where, _kind(found)) or found is None:
            return None
        if isinstance(found, (bridge.Question, str)):
            return found
        kept, compiled = found
        return self._program(kept, compiled, call, branches, key)

    def _expected(self, key: Key):
        """What is kept for this key, perhaps loaded before; None, and what differs is said."""
        waiting = self.ahead.pop(key.name, None)
        found = self._find(key) if waiting is None else waiting.result()
        if found is None:
            self._say_what_differs(key)
        self._compared = True
        return found

    def _find(self, key: Key):
        """What is kept, an executable loaded."""
        found = self.cache.find(key.name, key.parts)
        try:
            if isinstance(found, CachedGuard):
                return found.question()
            if not isinstance(found, CachedExecutable):
                return found
            compiled = _loaded.get(key.name)
            if compiled is None:
                devices = tuple(self.runner.mesh.devices.flat)
                compiled = serialize_executable.deserialize_and_load(
                    found.executable, found.in_tree, found.out_tree, devices[0].client, devices
                )
                _loaded[key.name] = compiled
            return found, compiled
        except Exception as error:  # of a runtime that refuses it: whatever it is, the program can be compiled
            return self.cache.remove(key.name, error)

    def _program(self, kept: CachedExecutable, compiled, call: Call, branches: int, key: Key) -> Program:
        program = Program(
            self._name,
            call.entry,
            call.shapes,
            branches,
            self.runner.mesh,
            {},
            None,
            kept.result,
            kept.seconds,
            compiled,
        )
        program.avals = [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in kept.avals]
        program.recalled = True
        return program

    def _say_what_differs(self, key: Key):
        """Once of a component; aloud only where somebody has made its executable ahead, and nothing of that is used."""
        if self.runner.part or self._compared:
            return
        apart, ahead = key.differs(self.cache) or (None, False)
        if ahead:
            notices.warn_once(
                f"ahead {key.model}",
                f"the executable of {key.model} that was made ahead is not used, it is compiled here: what it was made for differs"
                f" in {apart}. Run `diffusers-tpu compile` again for what is here, or run with what it was made for",
            )
        elif apart is not None:
            logger.info(f"{key.model} is compiled: what is kept of it for this call differs in {apart}")

    # Kept

    def keep(self, program: Program, ahead: bool = False):
        """A compiled program, for other processes. `ahead`: none has asked for it yet."""
        if program.key is None:
            return
        with self._run_goes_on():
            executable, in_tree, out_tree = serialize_executable.serialize(program.compiled)
            avals = [(a.shape, a.dtype.name) for a in program.avals]
            kept = CachedExecutable(executable, in_tree, out_tree, program.result, avals, program.compile_seconds)
            self.cache.keep(program.key.name, kept, program.key.parts, ahead=ahead)
            _loaded[program.key.name] = program.compiled

    def keep_question(self, key: Key | None, question: "bridge.Question", call: Call):
        """What a trace asked after the answers in the key, for other processes."""
        if key is None:
            return
        with self._run_goes_on():
            some = [values_of(call.tensors[number]) for number in question.inputs]
            given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in some]
            exported = export.export(question.compute, platforms=ASKED_ON)(*given)
            kept = CachedGuard(question.inputs, question.key, question.line, bytes(exported.serialize()))
            self.cache.keep(key.name, kept, key.parts, ahead=False)

    def keep_mark(self, key: Key | None, mark: str):
        """What a trace found out, for other processes."""
        if key is not None:
            self.cache.keep(key.name, mark, key.parts, ahead=False)

    @contextlib.contextmanager
    def _run_goes_on(self) -> Iterator[None]:
        """What cannot be kept, as the runtime or pickle has no form for it, is made anew by the next process."""
        try:
            yield
        except Exception as error:
            self.reason = f"it cannot be written down: {error!r:.200}"
            logger.info(f"a program of {self._name} is not kept: {self.reason}")


def lasting_words(runner) -> dict[str, str]:
    """The words of a module as it is, of its chips, of versions and sources. Raises NotPortable."""
    words, placed, plan, settings = StableKey(), runner.plan_weights(), runner.plan, runner.settings
    weights = [(name, a.shape, a.dtype.name, repr(a.sharding.spec)) for name, a in placed.avals.items()]
    fixed = {
        f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.name not in ("mesh", "tally")
    }
    kept = runner.kept
    planned = (
        (plan.carry, plan.batched, plan.whole, plan.axes, plan.decide, runner.part),
        tuple(plan.processors.items()),
        tuple(plan.methods.items()),
        None if kept is None else type(kept),
        tuple((group.label, group.path, group.start, group.stop) for group in placed.groups),
    )
    numbers = runner.number_arguments()
    found = {
        "state": words.of((runner.read_state, process_key())),
        "weights": repr(sorted(weights)),
        "numbers": repr(sorted((name, n.shape) for name, n in numbers.items())),
        "plan": words.of(planned),
        "settings": repr((fixed, runner.config.matmul_precision)),
        "mesh": _mesh_words(runner.mesh),
        "compiler": repr((sorted(runner.compiler_options.items()), _flags(), [_of_jax(name) for name in OF_JAX])),
        "versions": _versions(),
    }
    found["sources"] = f"{ours_in_words()} {sources_in_words(words.modules)}"
    return found


def _kind(found) -> str:
    """What all processes must have found."""
    return found if isinstance(found, str) else type(found).__name__


def _mesh_words(mesh) -> str:
    devices = [*mesh.devices.flat]
    where = [(d.id, *(getattr(d, "coords", None) or ()), getattr(d, "core_on_chip", 0)) for d in devices]
    parts = [(d.process_index, getattr(d, "slice_index", 0)) for d in devices]
    host = (_processor(), jax.process_index()) if devices[0].platform == "cpu" else ""
    return repr((dict(mesh.shape), devices[0].device_kind, where, parts, host))


@functools.cache
def _processor() -> str:
    """What XLA compiles for where the chips are simulated."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def _flags() -> list[str]:
    """Of the compiler, without how many chips are simulated, which is the mesh's to say, and what JAX adds on a TPU host."""
    flags = {*" ".join(os.environ.get(name, "") for name in FLAGS).split()} - flags_of_jax()
    return sorted(flag for flag in flags if "force_host_platform_device_count" not in flag and "dump" not in flag)


def _of_jax(name: str) -> str:
    return repr(getattr(jax.config, name, None))


@functools.cache
def _versions() -> str:
    found = ["python {}.{}".format(*sys.version_info)]  # what is pickled is alike in its patch versions
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    return ", ".join(found)
