"""One attention function behind torch's SDPA, diffusers' dispatcher and our processors.

Which chips it runs over and with which kernel is not an argument of every caller: the runner says it around a trace
with `using(...)`; outside of one (glue), a call runs where its arguments are.
"""

import contextlib
import contextvars
import functools
import math
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from ...utils import logging
from . import masks, online, splash
from .parallel import attention_by_heads, parallel_attention
from .reference import reference_attention


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Settings:
    """`mesh`: the chips; `sequence`: activations lie split over it by the sequence; `kernel`, `blocks` as in `TPUConfig`."""

    mesh: Mesh | None = None
    sequence: bool = True
    kernel: str = "auto"
    blocks: tuple[int, int, int] | None = None
    platform: str = "cpu"
    interpret: bool = False


_settings = contextvars.ContextVar("diffusers_tpu_attention", default=Settings())


@contextlib.contextmanager
def using(settings: Settings):
    """Attention calls inside run with these settings."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


def attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    *,
    mask=None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Array, "B N T D"]:
    """softmax(scale q k^T + mask) v with torch's meaning of every argument.

    Args:
        mask: bool (True takes part) or a bias, broadcastable to [B, N, T, S].
        scale: 1/sqrt(D) if None.

    Raises:
        ValueError: shapes that disagree, a mask that does not broadcast, a mask together with `is_causal`.
        TypeError: dtypes that disagree.
    """
    _check(q, k, v, mask, is_causal, enable_gqa)
    settings = _settings.get()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = masks.classify(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    run = _local(settings, q, k, mask)
    if settings.mesh is not None and settings.mesh.size > 1:
        spread = parallel_attention if settings.sequence else attention_by_heads
        run = functools.partial(spread, mesh=settings.mesh, local=run)

    def scaled_dot_product_attention(q, k, v):
        return run(q, k, v, mask=mask, is_causal=is_causal, scale=scale)

    if not isinstance(q, jax.core.Tracer):
        return scaled_dot_product_attention(q, k, v)
    return jax.jit(scaled_dot_product_attention)(q, k, v)  # one named call in the trace: what the planner counts


def _local(settings: Settings, q, k, mask):
    """The attention of one chip: the kernel asked for; with "auto" the one that takes this call, said once if slower."""
    fast = functools.partial(splash.splash_attention, interpret=settings.interpret, blocks=settings.blocks)
    if settings.kernel == "splash":
        return fast
    if settings.kernel == "online":
        return functools.partial(online.online_attention, interpret=settings.interpret, blocks=settings.blocks)
    if settings.kernel == "reference" or settings.platform != "tpu":
        return reference_attention
    reason = splash.unsupported(mask, q.shape[1], k.shape[1])
    if reason is None:
        return fast
    _say_once(reason)
    return reference_attention


@functools.cache
def _say_once(reason: str):
    logger.warning(f"attention: splash does not take {reason}; such calls run the slower reference")


def _check(q, k, v, mask, is_causal, enable_gqa):
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
    if mask is not None and is_causal:
        raise ValueError("expected either attn_mask or is_causal, got both; fold causality into the mask")
