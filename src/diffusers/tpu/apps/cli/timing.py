"""How long the parts of one call take, each counted when the device has finished it; compilation is counted apart."""

import contextlib
import functools
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from .... import tpu
from ..stages.running import in_place_of


@dataclass
class Timing:
    """Seconds by part, without compilation; `compile` by component and entry; `steps` one by one."""

    parts: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    compile: dict[str, float] = field(default_factory=dict)
    total: float = 0.0

    @property
    def median_step(self) -> float:
        """Of the steps after the first, which may differ from the others."""
        return statistics.median(self.steps[1:] or self.steps)


def wait(values):
    """Return when the device has finished these values."""
    arrays = [leaf.jax() for leaf in tree_leaves(values) if hasattr(leaf, "jax")]
    if arrays:
        import jax

        jax.block_until_ready(arrays)
    elif torch.cuda.is_available():
        torch.cuda.synchronize()


def compile_seconds(pipe) -> dict[str, float]:
    """Seconds spent tracing and compiling so far, by component and entry."""
    seconds: dict[str, float] = {}
    components = tpu.report(pipe)["components"] if tpu.is_active() else {}
    for name, component in components.items():
        for program in component["programs"]:
            label = name if program["entry"] == "forward" else f"{name}.{program['entry']}"
            seconds[label] = seconds.get(label, 0.0) + program["compile_seconds"]
    return seconds


class Stopwatch:
    """Times one call of `pipe`: `encode_prompt`, the VAE's `encode` and `decode`, and the steps between them."""

    def __init__(self, pipe):
        self.pipe, self.timing = pipe, Timing()
        self._whole = True
        self._last, self._last_compile = 0.0, 0.0

    def call(self, arguments: dict, takes_callback: bool, run=None):
        """The pipeline's output, on the host. `takes_callback`: it takes `callback_on_step_end`.

        `run`: what to call in place of the pipeline, a part of its call.
        """
        self._whole = run is None
        if takes_callback:
            arguments = {**arguments, "callback_on_step_end": self._step_ends}
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            for owner, name, part in self._parts():
                stack.enter_context(self._timed(owner, name, part))
            self._mark()
            output = (run or self.pipe)(**arguments)
            wait(list(vars(output).values()) if hasattr(output, "__dict__") else output)
        self.timing.total = time.perf_counter() - start
        self.timing.compile = compile_seconds(self.pipe)
        return output

    def _parts(self):
        if hasattr(self.pipe, "encode_prompt"):
            yield self.pipe, "encode_prompt", "text encode"
        vae = getattr(self.pipe, "vae", None)
        for name in ("encode", "decode"):
            if hasattr(vae, name):
                yield vae, name, f"VAE {name}"

    @contextlib.contextmanager
    def _timed(self, owner, name: str, part: str):
        method = getattr(owner, name)

        @functools.wraps(method)
        def run(*args, **kwargs):
            wait((args, kwargs))
            if self._whole and part == "VAE decode" and not self.timing.steps:
                self._add("denoising", self._mark())
            self._mark()
            output = method(*args, **kwargs)
            wait(output if isinstance(output, (tuple, list, torch.Tensor)) else list(vars(output).values()))
            self._add(part, self._mark())
            return output

        with in_place_of(owner, name, run):
            yield

    def _step_ends(self, pipe, step, timestep, arguments: dict) -> dict:
        wait(arguments)
        self.timing.steps.append(self._mark())
        return {}

    def _mark(self) -> float:
        """Seconds since the last mark, compilation left out."""
        now, compiled = time.perf_counter(), sum(compile_seconds(self.pipe).values())
        passed = now - self._last - (compiled - self._last_compile)
        self._last, self._last_compile = now, compiled
        return passed

    def _add(self, part: str, seconds: float):
        self.timing.parts[part] = self.timing.parts.get(part, 0.0) + seconds
