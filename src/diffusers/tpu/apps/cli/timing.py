"""Times the parts of one call; a part ends when the device has finished it. Compilation is counted separately."""

import contextlib
import functools
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import torch
from torch.utils._pytree import tree_leaves

from .... import tpu
from ...compile.state.watch import replaced
from ..generation.signature import parameters_of


PARTS = {"encode_prompt": "text encode", "encode": "VAE encode", "decode": "VAE decode"}


def wait(values):
    """Return when the device has computed these values."""
    if arrays := [leaf.jax() for leaf in tree_leaves(values) if hasattr(leaf, "jax")]:
        import jax

        jax.block_until_ready(arrays)
    elif torch.cuda.is_available():
        torch.cuda.synchronize()


def compile_seconds(pipe) -> Counter[str]:
    """Seconds that this process spent tracing and compiling so far, by component and entry; not those of recalled programs."""
    seconds: Counter[str] = Counter()
    components = tpu.report(pipe)["components"] if tpu.is_active() else {}
    for name, component in components.items():
        for program in (program for program in component["programs"] if not program["recalled"]):
            label = name if program["entry"] == "forward" else f"{name}.{program['entry']}"
            seconds[label] += program["compile_seconds"]
    return seconds


class Stopwatch:
    """Times a call of `pipe`: seconds of `parts` and each of `steps` without compilation, `total` with it; `load` since `start`."""

    def __init__(self, pipe, start: float):
        self.load = time.perf_counter() - start
        self.pipe, self.parts, self.steps, self.total = pipe, Counter(), [], 0.0
        self._last, self._last_compile = 0.0, 0.0

    @property
    def callback(self) -> dict:
        """The argument of the pipeline's call that reports its steps; empty if it takes none."""
        takes = "callback_on_step_end" in parameters_of(type(self.pipe))
        return {"callback_on_step_end": self._step_ends} if takes else {}

    @contextlib.contextmanager
    def running(self, whole: bool = True) -> Iterator[None]:
        """Times the body of the context. `whole`: it is the pipeline's whole call, not a part."""
        start, vae = time.perf_counter(), getattr(self.pipe, "vae", None)
        owners = [(o, n) for o, n in ((self.pipe, "encode_prompt"), (vae, "encode"), (vae, "decode")) if hasattr(o, n)]
        with replaced((vars(o), n, self._timed(getattr(o, n), PARTS[n], whole)) for o, n in owners):
            self._mark()
            yield
        self.total = time.perf_counter() - start

    def rows(self) -> Iterator[tuple[str, float]]:
        """Names and seconds in the order of a run; an empty name before the total."""
        yield "load", self.load
        yield from ((f"compile {name}", seconds) for name, seconds in compile_seconds(self.pipe).items())
        yield from ((part, seconds) for part, seconds in self.parts.items() if part != "VAE decode")
        if self.steps:
            yield "first step", self.steps[0]
            further = self.steps[1:] or self.steps
            yield f"median of {len(further)} further steps", statistics.median(further)
        yield from ((part, seconds) for part, seconds in self.parts.items() if part == "VAE decode")
        yield "", 0.0
        yield "total", self.load + self.total

    def _timed(self, method, part: str, is_whole_run: bool):
        @functools.wraps(method)
        def run(*args, **kwargs):
            wait((args, kwargs))
            passed = self._mark()
            if is_whole_run and part == "VAE decode" and not self.steps:
                self.parts["denoising"] += passed
            output = method(*args, **kwargs)
            wait(output if isinstance(output, (tuple, list, torch.Tensor)) else list(vars(output).values()))
            self.parts[part] += self._mark()
            return output

        return run

    def _step_ends(self, pipe, step, timestep, arguments: dict) -> dict:
        wait(arguments)
        self.steps.append(self._mark())
        return {}

    def _mark(self) -> float:
        """Seconds since the last mark, without compilation."""
        now, compiled = time.perf_counter(), compile_seconds(self.pipe).total()
        passed = now - self._last - (compiled - self._last_compile)
        self._last, self._last_compile = now, compiled
        return passed
