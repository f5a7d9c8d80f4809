"""Settings of the operations in one trace, set around it by the code that traces (`CompiledModule`, a VAE, the planner).

Outside of a trace the defaults apply: an operation runs where its arguments are.
"""

import contextlib
import contextvars
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from ..chips.figures import chip_of


@dataclass(frozen=True)
class Settings:
    """How the operations of one trace run.

    Attributes:
        sequence: activations are split over `sp` by the sequence.
        replicated: activations are whole on every chip of `sp`, and computed there; with `sequence` False.
        pad_tokens: padding behind the sequence, so that chips of `sp` have equally many: masked in attention, cut off at the end.
        kernel, blocks, smoothing, window, ring: as `TPUConfig.attention...`; `window` of denoisers only.
        platform: "tpu" or "cpu"; `generation` of a TPU, None elsewhere.
        interpret: kernels run in Pallas's interpret mode; they always do on the CPU.
        layers, convolutions: as `TPUConfig.layers` and `TPUConfig.convolution_precision`.
        linear: as `TPUConfig.linear`, of denoisers only.
        sparse: frames, height and width of the latents of a video, and `TPUConfig.attention_sparsity`; None: all keys are seen.
        added: results of layers are added up: where chips sum them, the compiler adds first, so that one sum is exchanged for all.
        differentiable: the trace will be differentiated: kernels are used through functions with gradients.
        tally: a `ModeCounter` of the attention kernel; None: nothing is counted.

    Raises NotImplementedError for an unknown TPU generation, ValueError for a `linear` in 8 bits that it does not multiply.
    """

    mesh: Mesh | None = None
    sequence: bool = True
    replicated: bool = False
    pad_tokens: int = 0
    kernel: str = "auto"
    blocks: tuple[int, int, int] | None = None
    smoothing: bool = True
    window: tuple[int, int] | None = None
    ring: int | None = None
    platform: str = "cpu"
    generation: str | None = None
    interpret: bool = False
    layers: str = "auto"
    convolutions: str = "high"
    linear: str = "bfloat16"
    sparse: tuple[tuple[int, int, int], float] | None = None
    added: bool = False
    differentiable: bool = False
    tally: object = None

    def __post_init__(self):
        if self.platform == "tpu" or self.generation is not None:
            narrow = chip_of(self.generation or "unknown").narrow
            if self.linear not in ("bfloat16", narrow):
                raise ValueError(
                    f"expected TPUConfig.linear to be 'bfloat16' or '{narrow}' on {self.generation}, got '{self.linear}',"
                    " whose products it makes of bfloat16 ones"
                )

    @property
    def chips(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def interpreted(self) -> bool:
        """Kernels run in Pallas's interpret mode."""
        return self.interpret or self.platform == "cpu"

    @property
    def own_layers(self) -> bool:
        """`linear`, `rotary` and `convolution` may use their kernels."""
        return self.layers == "kernel" or (self.layers == "auto" and self.platform == "tpu")


_settings = contextvars.ContextVar("diffusers_tpu_settings", default=Settings())


def current() -> Settings:
    """The settings of the trace that runs."""
    return _settings.get()


@contextlib.contextmanager
def bound(variable: contextvars.ContextVar, value):
    """A context in which the variable has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def using(settings: Settings):
    """A context in which operations run with these settings."""
    return bound(_settings, settings)


def choosing(kernel: str | None):
    """A context in which attention uses this kernel, a name of `TPUConfig.attention`; None changes nothing."""
    return using(current() if kernel is None else replace(current(), kernel=kernel))
