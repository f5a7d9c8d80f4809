"""One attention function behind torch's SDPA, diffusers' dispatcher and our processors.

Which chips it runs over and with which kernel is not an argument of every caller: the runner says it around a trace
with `using(...)`; outside of one (glue), a call runs where its arguments are. What became of each call: `explain()`.
"""

import contextlib
import contextvars
import functools
import math
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from ...utils import logging
from . import gpu, kernel, masks, splash
from .parallel import attention_by_heads, parallel_attention, plan_ring
from .reference import reference_attention


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Settings:
    """How attention calls of one trace run.

    Attributes:
        mesh: the chips.
        sequence: activations lie split over `sp` by the sequence.
        kernel, blocks, smoothing, window, ring: as `TPUConfig.attention...`.
        platform: "tpu", "gpu" or "cpu"; `generation` of a TPU.
        interpret: kernels run in Pallas's interpret mode; they always do on the CPU.
        layers: as `TPUConfig.layers`, for the rooms `linear` and `rotary`.
        convolutions: as `TPUConfig.convolution_precision`, for the rooms `video` and `bridge`.
    """

    mesh: Mesh | None = None
    sequence: bool = True
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

    @property
    def interpreted(self) -> bool:
        """Kernels run in Pallas's interpret mode."""
        return self.interpret or self.platform == "cpu"

    @property
    def own_layers(self) -> bool:
        """The rooms `linear` and `rotary` may use their kernels."""
        return self.layers == "kernel" or (self.layers == "auto" and self.platform == "tpu")


_settings = contextvars.ContextVar("diffusers_tpu_attention", default=Settings())


def current() -> Settings:
    """Those of the trace that runs."""
    return _settings.get()


@contextlib.contextmanager
def using(settings: Settings):
    """Attention calls inside run with these settings."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


@contextlib.contextmanager
def choosing(kernel: str | None):
    """Attention calls inside run with this kernel, by name as in `TPUConfig.attention`; None leaves it as it is."""
    with using(_settings.get() if kernel is None else replace(_settings.get(), kernel=kernel)):
        yield


_paths = contextvars.ContextVar("diffusers_tpu_attention_paths", default=kernel.PATHS)


@contextlib.contextmanager
def assuming(path: str):
    """The kernel is compiled with this one of its ways: for the planner, which reads schedules and cannot know values."""
    token = _paths.set((path,))
    try:
        yield
    finally:
        _paths.reset(token)


@dataclass(frozen=True)
class Way:
    """What became of attention calls of one shape.

    Attributes:
        q, k: their shapes [B, N, T, D] and [B, K, S, D], and the `dtype`.
        mask: its kind (`Mask.kind`), "" for none.
        kernel: the function that computes it on one chip.
        chips: how it is spread over the mesh.
        reason: why it is not the fast kernel, where one was expected; else "".
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: str
    mask: str
    kernel: str
    chips: str
    reason: str = ""


_ways: dict[Way, int] = {}


def explain() -> dict[Way, int]:
    """Which way attention calls went in this process, and how often each was traced or called."""
    return dict(_ways)


def attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    *,
    mask=None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Array, "B N T E"]:
    """softmax(scale q k^T + mask) v with torch's meaning of every argument.

    Args:
        mask: bool (True takes part) or a bias, broadcastable to [B, N, T, S].
        scale: 1/sqrt(D) if None.

    Raises:
        ValueError: shapes that disagree, a mask that does not broadcast, a mask together with `is_causal`.
        TypeError: dtypes that disagree.
        NotImplementedError: the kernel asked for by name does not take this call.
    """
    _check(q, k, v, enable_gqa)
    settings = _settings.get()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    window = settings.window if q.shape[2] == k.shape[2] else None
    mask = masks.classify(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2], is_causal, window)
    name, local, reason = _local(settings, q, k, v, mask)
    run, chips = _spread(settings, q, k, local)
    way = Way(q.shape, k.shape, str(q.dtype), "" if mask is None else mask.kind, name, chips, reason)
    _ways[way] = _ways.get(way, 0) + 1
    if reason:
        _say_once(name, reason)

    def scaled_dot_product_attention(q, k, v):
        return run(q, k, v, mask=mask, scale=scale)

    if not isinstance(q, jax.core.Tracer):
        return scaled_dot_product_attention(q, k, v)
    return jax.jit(scaled_dot_product_attention)(q, k, v)  # one named call in the trace: what the planner counts


def _local(settings: Settings, q, k, v, mask):
    """(name, attention of one chip, why no faster one): what was asked for by name, or with "auto" the fastest that takes this call."""
    interpret = settings.interpreted
    ours = functools.partial(
        kernel.tpu_attention,
        generation=settings.generation,
        wanted=settings.blocks,
        smoothing=settings.smoothing,
        paths=_paths.get(),
        interpret=interpret,
    )
    online = functools.partial(ours, paths=("online",))
    stock = functools.partial(splash.splash_attention, interpret=interpret, blocks=settings.blocks)
    known = {
        "kernel": (ours, kernel.unsupported),
        "online": (online, kernel.unsupported),
        "splash": (stock, splash.unsupported),
        "cudnn": (gpu.cudnn_attention, gpu.unsupported),
        "reference": (reference_attention, lambda q, k, v, mask: None),
    }
    name = settings.kernel
    if name == "auto":
        name = {"tpu": "kernel", "gpu": "cudnn"}.get(settings.platform, "reference")
        reason = known[name][1](q, k, v, mask)
        return (
            (name, known[name][0], "")
            if reason is None
            else ("reference", reference_attention, f"{name} does not take {reason}")
        )
    run, unsupported = known[name]
    if (
        settings.platform == "gpu"
        and name not in ("cudnn", "reference")
        or settings.platform != "gpu"
        and name == "cudnn"
    ):
        raise NotImplementedError(f"attention {name!r} does not run on {settings.platform}; use 'auto' or 'reference'")
    if reason := unsupported(q, k, v, mask):
        raise NotImplementedError(f"attention {name!r} does not take {reason}; use 'auto' or 'reference'")
    return name, run, ""


def _spread(settings: Settings, q, k, local):
    """(the attention of all chips, how it is spread in words)."""
    mesh = settings.mesh
    if mesh is None or mesh.size == 1:
        return local, "one chip"
    if not settings.sequence or q.shape[2] < mesh.shape["sp"]:
        return functools.partial(attention_by_heads, mesh=mesh, local=local), "by heads"
    sp, tp = mesh.shape["sp"], mesh.shape["tp"]
    spread = functools.partial(parallel_attention, mesh=mesh, local=local, ring=settings.ring)
    if q.shape[2] != k.shape[2]:
        return spread, f"queries over {sp}, whole keys"
    share = tp if q.shape[1] % tp == k.shape[1] % tp == 0 else 1
    ring, ulysses = plan_ring(sp, q.shape[1] // share, k.shape[1] // share, settings.ring)
    return spread, f"ring {ring} x ulysses {ulysses}"


@functools.cache
def _say_once(name: str, reason: str):
    logger.warning(f"attention: {reason}; such calls run the slower {name}")


def _check(q, k, v, enable_gqa):
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"expected q, k, v of four axes, got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"expected q [B, N, T, D], k [B, K, S, D], v [B, K, S, E], got {q.shape}, {k.shape}, {v.shape}"
        )
    if q.shape[1] != k.shape[1] and (not enable_gqa or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"expected as many key heads as query heads, or enable_gqa with a divisor of them, got {q.shape[1]} query and"
            f" {k.shape[1]} key heads, enable_gqa={enable_gqa}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"expected one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}")
