"""Compiles for TPUs on a machine that has none: the compiler in libtpu needs no TPU.

`run_in_child` calls a function in a child process that is set up for libtpu; a crash or a hang of the child raises here. There,
`Compiler` returns a compiled program's text, its memory and each operation's final schedule (bundles of the core's instructions).
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
DUMP_VARIABLE = "DIFFUSERS_TPU_SCHEDULES"  # from run_in_child to its child: the folder of schedules


class ChildError(Failure):
    """The child crashed or reached its time limit; the message ends with its last lines of output."""


class OutOfMemory(Failure):
    """The compiler ran out of memory on the chip. `asked` and `limit`: bytes in its message, None if it names none."""

    def __init__(self, message: str, asked: int | None, limit: int | None):
        super().__init__(message)
        self.asked, self.limit = asked, limit


class BadRequest(ValueError):
    """The request is invalid. `run_in_child` raises it as ValueError."""


class NoCompiler(NotImplementedError):
    """libtpu is not installed."""


@dataclass(frozen=True)
class CompiledProgram:
    """The compiler's results for one lowered program. `seconds`: the time to compile."""

    text: str  # the scheduled HLO, with layouts and the compiler's estimates
    schedules: dict[str, str]  # operation -> text of its final schedule; of equal operations only one has an entry
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
    """Calls `function(argument, progress)` in a new process that can compile for TPUs, and returns its result.

    Args:
        function: "module:name", importable in the child.
        argument: sent as JSON, as is the result.
        seconds: time limit, at which the child and all its processes are killed.
        schedules: whether a `Compiler` in the child returns schedules; writing them takes up to half of its time.
        environment: further environment variables of the child.
        on_progress: called with the text of every `progress(text)` in the child.

    Raises:
        NoCompiler: libtpu is not installed.
        OutOfMemory: the function raised it.
        ValueError: the function raised BadRequest; the message is the same.
        ChildError: any other failure in the child.
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
    """Kind and value of the child's result or error (None without one), its exit status, and whether it reached the time limit."""
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
            child.stdin.flush()  # stays open: the child exits when this process ends and closes it
        for line in child.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # of a child that was killed meanwhile
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
    """Kills the child and all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _environment(work: Path | None) -> dict[str, str]:
    """The child's environment. `work`: the folder in which schedules are written; None writes none."""
    arguments, dump = os.environ.get("LIBTPU_INIT_ARGS", "").split(), ""
    if work is not None:
        dump = work / "schedules"
        dump.mkdir()
        arguments += [f"--xla_jf_dump_to={dump}", *SCHEDULE_FLAGS]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the child can import what this process can
        "DIFFUSERS_TPU": "off",  # the program is for chips elsewhere, even on a TPU host
        "JAX_PLATFORMS": "cpu",
        "JAX_FORCE_TPU_INIT": "1",  # JAX sets the same variables and flags as on a TPU host
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-8",  # libtpu needs one to start; each Compiler has its own topology
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # no source lines in programs
        "LIBTPU_INIT_ARGS": " ".join(arguments),
        DUMP_VARIABLE: str(dump),
    }


# In the child


class Compiler:
    """Compiles lowered programs for one topology."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.dump = Path(os.environ[DUMP_VARIABLE]) if os.environ.get(DUMP_VARIABLE) else None

    @property
    def flags(self) -> str:
        """The compiler's flags, with a constant in place of the folder of schedules."""
        return os.environ.get("LIBTPU_INIT_ARGS", "").replace(str(self.dump), "SCHEDULES")

    @property
    def asked_flags(self) -> str:
        """The user's flags: those without ours for schedules and without JAX's."""
        given = [flag for flag in self.flags.split() if flag not in flags_of_jax()]
        return " ".join(flag for flag in given if not flag.startswith("--xla_jf_dump"))

    @property
    def devices(self) -> tuple:
        """JAX's devices of the topology. Programs can be compiled for them but not run."""
        from jax.experimental import topologies

        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{self.topology.compiler_name}:{'x'.join(map(str, self.topology.shape))}",
            chips_per_host_bounds=self.topology.host_shape,
            **({"num_slices": self.topology.slices} if self.topology.slices > 1 else {}),
        )
        return tuple(description.devices)

    def compile(self, lowered, options: dict | None = None) -> CompiledProgram:
        """Compiles a `jax.stages.Lowered`; `options`: of `devices.compiler_options`. Raises OutOfMemory if no chip can hold it."""
        self._take_schedules()  # discards those of earlier programs
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
        """Operation -> final schedule, of programs compiled since the last call. Deletes the files."""
        taken = {}
        for path in list(self.dump.iterdir()) if self.dump else []:
            if name := re.fullmatch(r"\d+-(.*)-\d+-final_bundles\.txt", path.name):
                taken[name[1]] = path.read_text(errors="replace")
            path.unlink()
        return taken


@contextlib.contextmanager
def out_of_memory_told():
    """Raises an out-of-memory error of the compiler or the runtime as OutOfMemory."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if exhausted(error) is None:
            raise
        raise OutOfMemory(str(error).split("\n")[0], *hbm_asked(str(error))) from error


def main(function: str):
    """Runs in the child: reads one request from standard input, writes JSON lines to the original standard output."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints go to standard error from here on, not between the JSON lines

    def say(kind: str, value):
        channel.write(json.dumps([kind, value]) + "\n")

    argument = json.loads(sys.stdin.readline())
    # Standard input ends with the parent. This thread then ends the process, as Python cannot interrupt a compilation of minutes.
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
    os._exit(0)  # does not join libtpu's threads
