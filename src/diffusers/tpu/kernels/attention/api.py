"""One attention function behind torch's SDPA, diffusers' dispatcher and our processors.

Which chips it runs over and with which kernel is not an argument of every caller: the room `settings` says it for a trace.
What became of each call: `explain()`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ....utils import logging
from ..settings import Settings, current, using
from . import kernel, masks, splash
from .joint import Text, joint_attention, joint_mask
from .parallel import attention_by_heads, parallel_attention, plan_ring
from .reference import reference_attention
from .softmax_modes import ONLINE


logger = logging.get_logger(__name__)


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
        mask: bool (True takes part) or a bias, broadcastable to [B, N, T, S]; or a `Mask`, whose kind is known.
        scale: 1/sqrt(D) if None.

    Raises:
        ValueError: shapes that disagree, a mask that does not broadcast, a mask together with `is_causal`.
        TypeError: dtypes that disagree.
        NotImplementedError: the kernel asked for by name does not take this call.
    """
    _check(q, k, v, enable_gqa)
    settings = current()
    if settings.fill:
        raise NotImplementedError(
            f"expected attention in which latents that are none can be told apart, got that of q {q.shape} among blocks that"
            f" are filled up by {settings.fill}"
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    window = settings.window if q.shape[2] == k.shape[2] else None
    if not isinstance(mask, masks.Mask):
        mask = masks.classify(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2], is_causal, window)
    run, name, chips, reason = _chosen(settings, q, k, v, mask)
    _note(Way(q.shape, k.shape, str(q.dtype), "" if mask is None else mask.kind, name, chips, reason))
    if not isinstance(q, jax.core.Tracer):
        return _program(settings, scale)(q, k, v, mask)

    def scaled_dot_product_attention(q, k, v):
        return run(q, k, v, mask=mask, scale=scale)

    return jax.jit(scaled_dot_product_attention)(q, k, v)  # one named call in the trace: what the planner counts


def joint(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T E"],
    text: Text,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B N T E"], Float[Array, "B N L E"]]:
    """Latents and text in one softmax: (the latents' answer, the text's). `scale`: 1/sqrt(D) if None.

    Raises as `attention` does, and NotImplementedError for a window.
    """
    for one in ((q, k, v), (text.q, text.k, text.v)):
        _check(*one, enable_gqa=q.shape[1] != k.shape[1])
    settings = current()
    if settings.window is not None:
        raise NotImplementedError(
            f"expected no attention_window for attention of latents and text in one softmax, got {settings.window}: a window"
            " is of one sequence; leave it out"
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = joint_mask(k.shape[2] - settings.fill, k.shape[2], text)
    name, local, reason = _local(settings, q, k, v, mask)
    _, chips = _spread(settings, q, k, local)
    kind = "joint" if mask is None else f"joint+{mask.kind}"
    both = (*k.shape[:2], k.shape[2] + text.k.shape[2], k.shape[3])
    _note(Way(q.shape, both, str(q.dtype), kind, name, chips, reason))
    mesh = settings.mesh if settings.sequence else None
    run = functools.partial(
        joint_attention, scale=scale, mesh=mesh, local=local, ring=settings.ring, fill=settings.fill
    )
    if mesh is None and settings.mesh is not None and settings.mesh.size > 1:
        run.keywords["local"] = functools.partial(attention_by_heads, mesh=settings.mesh, local=local)

    def scaled_dot_product_attention(q, k, v, *words):
        return run(q, k, v, Text(*words, text.seen), interpret=_interpret(settings, local))

    return jax.jit(scaled_dot_product_attention)(q, k, v, text.q, text.k, text.v)


def among_latents(
    q: Float[Array, "B N T D"], k: Float[Array, "B K T D"], v: Float[Array, "B K T E"], *, scale: float | None = None
) -> Float[Array, "B N T E"]:
    """Attention of latents among themselves, whose last may be none of the model's (`Settings.fill`). Raises as `attention` does."""
    settings = current()
    tokens = k.shape[2] - settings.fill
    mask = (
        masks.Mask(keys=(jnp.arange(k.shape[2]) < tokens)[None, None, None], whole=tokens) if settings.fill else None
    )
    with using(replace(settings, fill=0)):
        return attention(q, k, v, mask=mask, scale=scale)


def _note(way: Way):
    _ways[way] = _ways.get(way, 0) + 1
    if way.reason:
        _say_once(way.kernel, way.reason)


def _interpret(settings: Settings, local):
    """How our kernels run around this attention of one chip; None: it is not ours."""
    return settings.interpreted if getattr(local, "func", None) is kernel.tpu_attention else None


def _chosen(settings: Settings, q, k, v, mask) -> tuple[Callable, str, str, str]:
    """(attention of all chips, the name of one chip's, how it is spread, why it is no faster one)."""
    name, local, reason = _local(settings, q, k, v, mask)
    run, chips = _spread(settings, q, k, local)
    return run, name, chips, reason


@functools.lru_cache(maxsize=256)
def _program(settings: Settings, scale: float):
    """Attention outside of a trace, compiled once for arguments of one kind."""

    def scaled_dot_product_attention(q, k, v, mask):
        run, *_ = _chosen(settings, q, k, v, mask)
        return run(q, k, v, mask=mask, scale=scale)

    return jax.jit(scaled_dot_product_attention)


def _local(settings: Settings, q, k, v, mask):
    """(name, attention of one chip, why no faster one): what was asked for by name, or with "auto" the fastest that takes this call."""
    name = settings.kernel
    if name == "auto":
        name = "kernel" if settings.platform == "tpu" else "reference"
    run, unsupported = KERNELS[name](settings)
    reason = unsupported(q, k, v, mask)
    if reason is None:
        return name, run, ""
    if settings.kernel == "auto":
        return "reference", reference_attention, f"{name} does not take {reason}"
    raise NotImplementedError(f"attention {name!r} does not take {reason}; use 'auto' or 'reference'")


def _ours(settings: Settings, **fixed):
    options = {
        "generation": settings.generation,
        "wanted": settings.blocks,
        "smoothing": settings.smoothing,
        "tally": settings.tally,
        "interpret": settings.interpreted,
    }
    return functools.partial(kernel.tpu_attention, **options, **fixed), kernel.unsupported


def _stock(settings: Settings):
    options = {"interpret": settings.interpreted, "blocks": settings.blocks}
    return functools.partial(splash.splash_attention, **options), splash.unsupported


# By name: (attention of one chip with these settings, why it does not take a call).
KERNELS: dict[str, Callable[[Settings], tuple[Callable, Callable]]] = {
    "kernel": _ours,
    "online": functools.partial(_ours, ways=(ONLINE,)),
    "splash": _stock,
    "reference": lambda settings: (reference_attention, lambda q, k, v, mask: None),
}


def _spread(settings: Settings, q, k, local):
    """(the attention of all chips, how it is spread in words)."""
    mesh = settings.mesh
    if mesh is None or mesh.size == 1:
        return local, "one chip"
    if not settings.sequence or q.shape[2] < mesh.shape["sp"]:
        return functools.partial(attention_by_heads, mesh=mesh, local=local), "by heads"
    sp, tp = mesh.shape["sp"], mesh.shape["tp"]
    interpret = _interpret(settings, local)
    spread = functools.partial(parallel_attention, mesh=mesh, local=local, ring=settings.ring, interpret=interpret)
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
