"""Compiling for a TPU that is not here: the TPU compiler in libtpu runs on any machine.

`run_in_child` calls a function in a process that is ready for it; a crash or a hang there is an error here. `Compiler` is what such a
function compiles with: it keeps the program's text, its memory and each operation's final schedule (bundles of the core's instructions).
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from ..chips.devices import compile_lowered, flags_of_jax
from ..chips.figures import Topology
from ..common.errors import Failure, exhausted, hbm_asked


LAST_LINES = 15
SCHEDULE_FLAGS = (
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_category_filter=codegen",
    "--xla_jf_dump_llo_pass_label_regex=^final_bundles",
)
DUMP_VARIABLE = "DIFFUSERS_TPU_SCHEDULES"  # from run_in_child to its child


class ChildError(Failure):
    """The child crashed or ran out of time; the message ends with its last lines."""


class OutOfMemory(Failure):
    """The compiler found no room on the chip. `asked` and `limit` in bytes, None where its message names none."""

    def __init__(self, message: str, asked: int | None, limit: int | None):
        super().__init__(message)
        self.asked, self.limit = asked, limit


class BadRequest(ValueError):
    """What was asked for cannot be done; the caller of `run_in_child` gets it as ValueError."""


class NoCompiler(NotImplementedError):
    """libtpu is not installed."""


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler made of one lowered program, in `seconds`."""

    text: str  # the scheduled HLO, with layouts and the compiler's estimates
    schedules: dict[str, str]  # operation -> text of its final schedule; of operations that are alike, one has it
    memory: dict[str, int]  # bytes on one chip: `arguments`, `outputs`, `aliased`, `temporaries`, `program`
    seconds: float


def run_in_child(
    function: str,
    argument: dict,
    *,
    seconds: float,
    schedules: bool = True,
    environment: dict[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """What `function(argument, progress)` returns in a new process that is ready to compile for TPUs.

    Args:
        function: "module:name", importable there.
        argument: goes there as JSON; the result comes back so, and the text of every `progress(text)`, to `on_progress`.
        seconds: after these the child and all its processes are killed.
        schedules: a `Compiler` there keeps them; writing them is up to half of its time.
        environment: further variables of the child's.

    Raises:
        NoCompiler: libtpu is not installed.
        OutOfMemory: the compiler said so.
        ValueError: the function raised one; the message is its own.
        ChildError: anything else went wrong there.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise NoCompiler(
            "expected the package libtpu, which holds the TPU compiler, and found none; install it with"
            " pip install 'jax[tpu]' (it needs no TPU, on Linux with an x86-64 processor)"
        )
    folder = tempfile.TemporaryDirectory(prefix="diffusers-tpu-", ignore_cleanup_errors=True)
    with folder as work, open(Path(work, "errors"), "w+", errors="replace") as errors:
        variables = {**_environment(Path(work) if schedules else None), **(environment or {})}
        kind, value, status, late = _ask(function, argument, variables, errors, seconds, on_progress)
        errors.seek(0)
        lines = [f"  {line.rstrip()}" for line in errors if line.strip()][-LAST_LINES:]
    said = "\n".join(["Its last lines:", *lines]) if lines else "It said nothing."
    if late:
        raise ChildError(f"expected an answer within {seconds:.0f} s, stopped it then. {said}")
    if kind == "result":
        return value
    if kind is not None:
        raise {"bad input": ValueError, "out of memory": OutOfMemory}[kind](*value)
    died = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    raise ChildError(f"the compiler's process {died}. {said}")


def _ask(function: str, argument: dict, environment: dict, errors, seconds: float, on_progress: Callable) -> tuple:
    """Kind and value of the child's last message (None without one), its exit status, whether it was stopped for its time."""
    command, pipe = [sys.executable, "-c", f"from {__name__} import main; main({function!r})"], subprocess.PIPE
    child = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, start_new_session=True, text=True
    )
    late = threading.Event()
    timer = threading.Timer(seconds, lambda: (late.set(), kill(child)))
    timer.start()
    kind = value = None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(argument) + "\n")
            child.stdin.flush()  # and stays open: its end tells the child that we are gone
        for line in child.stdout:
            said, of = json.loads(line)
            if said == "progress":
                on_progress(of)
            else:
                kind, value = said, of
        return kind, value, child.wait(), late.is_set()
    finally:
        timer.cancel()
        kill(child)
        for end in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):
                end.close()


def kill(child: subprocess.Popen):
    """The child and all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _environment(work: Path | None) -> dict[str, str]:
    """`work`: where schedules are written, None for none."""
    arguments, dump = os.environ.get("LIBTPU_INIT_ARGS", "").split(), ""
    if work is not None:
        dump = work / "schedules"
        dump.mkdir()
        arguments += [f"--xla_jf_dump_to={dump}", *SCHEDULE_FLAGS]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # what this process can import, the child can
        "DIFFUSERS_TPU": "off",  # the program is for chips elsewhere, whatever this host has
        "JAX_PLATFORMS": "cpu",
        "JAX_FORCE_TPU_INIT": "1",  # JAX sets the variables and flags that it sets where a TPU is
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-8",  # asked for by libtpu's start; what is compiled for is each Compiler's own
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # the lines that a program was traced at are no part of it
        "LIBTPU_INIT_ARGS": " ".join(arguments),
        DUMP_VARIABLE: str(dump),
    }


# In the child


class Compiler:
    """Lowered programs of one topology, compiled."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.dump = Path(os.environ[DUMP_VARIABLE]) if os.environ.get(DUMP_VARIABLE) else None

    @property
    def flags(self) -> str:
        """What the compiler was told at its start, wherever it writes schedules."""
        return os.environ.get("LIBTPU_INIT_ARGS", "").replace(str(self.dump), "SCHEDULES")

    @property
    def asked_flags(self) -> str:
        """Those that the user gave, without ours for schedules and JAX's own."""
        given = [flag for flag in self.flags.split() if flag not in flags_of_jax()]
        return " ".join(flag for flag in given if not flag.startswith("--xla_jf_dump"))

    @property
    def devices(self) -> tuple:
        """JAX's devices of the topology: they compile, they do not run."""
        from jax.experimental import topologies

        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{self.topology.compiler_name}:{'x'.join(map(str, self.topology.shape))}",
            chips_per_host_bounds=self.topology.host_shape,
            **({"num_slices": self.topology.slices} if self.topology.slices > 1 else {}),
        )
        return tuple(description.devices)

    def compile(self, lowered, options: dict | None = None) -> CompiledProgram:
        """The compiled form of a `jax.stages.Lowered`, by `devices.compiler_options`. Raises OutOfMemory where no chip has room."""
        self._take_schedules()  # of anything compiled before
        start = time.perf_counter()
        with out_of_memory_told():
            compiled = compile_lowered(lowered, options)
        seconds = time.perf_counter() - start
        m = compiled.memory_analysis()
        memory = {
            "arguments": m.argument_size_in_bytes,
            "outputs": m.output_size_in_bytes,
            "aliased": m.alias_size_in_bytes,
            "temporaries": m.temp_size_in_bytes,
            "program": m.generated_code_size_in_bytes,
        }
        return CompiledProgram(compiled.as_text(), self._take_schedules(), memory, seconds)

    def _take_schedules(self) -> dict[str, str]:
        """Operation -> final schedule, of what was compiled since the last time."""
        taken = {}
        for path in list(self.dump.iterdir()) if self.dump else []:
            if name := re.fullmatch(r"\d+-(.*)-\d+-final_bundles\.txt", path.name):
                taken[name[1]] = path.read_text(errors="replace")
            path.unlink()
        return taken


@contextlib.contextmanager
def out_of_memory_told():
    """The error of a compiler or a runtime that finds no room on the chip, as OutOfMemory."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if exhausted(error) is None:
            raise
        raise OutOfMemory(str(error).split("\n")[0], *hbm_asked(str(error))) from error


def main(function: str):
    """The child: one request from standard input, answers as JSON lines to what was standard output."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints from here on must not mix with the answers

    def say(kind: str, value):
        channel.write(json.dumps([kind, value]) + "\n")

    argument = json.loads(sys.stdin.readline())
    # The parent keeps our standard input open while it lives; a compilation takes minutes and hears no exception of Python's.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    try:
        result = resolve_name(function)(argument, lambda value: say("progress", value))
    except OutOfMemory as error:
        say("out of memory", [str(error), error.asked, error.limit])
    except BadRequest as error:
        say("bad input", [str(error)])
    else:
        say("result", result)
    channel.flush()
    os._exit(0)  # libtpu's threads are not waited for
