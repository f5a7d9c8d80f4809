"""One attention function behind torch's SDPA, diffusers' dispatcher and our processors.

Mesh and kernel are not arguments: they come from `kernels.settings`. `explain()` lists how calls were computed.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ...common.notices import warn_once
from ..settings import Settings, current, using
from . import kernel, masks, splash
from .backward import differentiable_attention
from .joint import Text, joint_attention, joint_mask
from .parallel import attention_by_heads, has_many_keys, parallel_attention, split_over
from .reference import Keys, Out, Queries, Values, reference_attention
from .softmax_modes import ONLINE
from .sparse import Nearest, nearest


@dataclass(frozen=True)
class Dispatch:
    """How attention calls of one shape are computed.

    Attributes:
        q, k: shapes [B, N, T, D] and [B, K, S, D].
        mask: `Mask.kind`, "" for none.
        kernel: name in `KERNELS` of the kernel on each chip; "one key": none, the result is the key's value.
        chips: how the call is split over the mesh.
        reason: why the fast kernel was not used, where it was expected; else "".
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: str
    mask: str
    kernel: str
    chips: str
    reason: str = ""


ATTENTION = "scaled_dot_product_attention"  # the name of attention calls in a trace
_dispatched: Counter[Dispatch] = Counter()


def explain() -> dict[Dispatch, int]:
    """How attention calls were computed in this process, and how often each was traced or called."""
    return dict(_dispatched)


def attention(
    q: Queries, k: Keys, v: Values, *, mask=None, is_causal=False, scale: float | None = None, enable_gqa=False
) -> Out:
    """softmax(scale q k^T + mask) v, with the arguments of torch's `scaled_dot_product_attention`.

    Args:
        mask: bool (True takes part) or a bias, broadcastable to [B, N, T, S]; or a `Mask`, already classified.
        scale: 1/sqrt(D) if None.

    Raises:
        ValueError: shapes that disagree, a mask that does not broadcast.
        TypeError: dtypes that disagree, a mask that is neither bool nor floating.
        NotImplementedError: the kernel chosen by name does not support this call; `Settings.pad_tokens` is set.
    """
    _check(q, k, v, enable_gqa)
    settings = current()
    if settings.pad_tokens:
        raise NotImplementedError(
            f"expected attention in which latents that are none can be told apart, got that of q {q.shape} among blocks that"
            f" are filled up by {settings.pad_tokens}"
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    window = settings.window if q.shape[2] == k.shape[2] else None
    if not isinstance(mask, masks.Mask):
        mask = masks.classify(mask, *q.shape[:3], k.shape[2], is_causal, window)
    # The weight of one key is 1: an image's embedding (Stable Video Diffusion). Upstream's gradients of q and k are zeros, not None.
    if mask is None and k.shape[2] == 1 and not settings.differentiable:
        _record(Dispatch(q.shape, k.shape, str(q.dtype), "", "one key", "each by itself"))
        return jnp.broadcast_to(jnp.repeat(v, q.shape[1] // k.shape[1], 1), (*q.shape[:3], v.shape[3]))
    if mask is None and q.shape[2] == k.shape[2]:
        near = _nearest(settings, q.shape[2], q.shape[2])
        mask = near and masks.Mask(nearest=near)
    whole = functools.partial(masks.in_scores, mask=mask, scale=scale)
    _, how = _dispatch(settings, *jax.eval_shape(whole, q, k, v))
    _record(how)
    if not isinstance(q, jax.core.Tracer):
        return _program(settings, q, k, v, mask, scale)
    return _named(lambda q, k, v: _attended(settings, q, k, v, mask, scale), mask and mask.nearest)(q, k, v)


def joint(q: Queries, k: Keys, v: Values, text: Text) -> tuple[Out, Out]:
    """Attention of latents and text in one softmax, with scale 1/sqrt(D): (result of the latents, of the text).

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
    near = _nearest(settings, k.shape[2] - settings.pad_tokens, k.shape[2])
    mask = joint_mask(k.shape[2] - settings.pad_tokens, k.shape[2], text, near)
    name, local, reason = _local(settings, q, k, v, mask)
    _, chips = _spread(settings, q, k, mask, local)
    both = (*k.shape[:2], k.shape[2] + text.k.shape[2], k.shape[3])
    kind = "joint" if mask is None else f"joint+{mask.kind}"
    _record(Dispatch(q.shape, both, str(q.dtype), kind, name, chips, reason))

    how = {"scale": 1 / math.sqrt(q.shape[-1]), "near": near, **_over_mesh(settings, local)}
    how |= {"pad_tokens": settings.pad_tokens, "sequence": settings.sequence}
    attend = _named(lambda q, k, v, *words: joint_attention(q, k, v, Text(*words, text.seen), **how), near)
    return attend(q, k, v, text.q, text.k, text.v)


def among_latents(q: Queries, k: Keys, v: Values) -> Out:
    """Self-attention of latents; the last `Settings.pad_tokens` of them are padding, masked as keys. Raises as `attention` does."""
    settings, mask = current(), None
    tokens = k.shape[2] - settings.pad_tokens
    if settings.pad_tokens:
        keys, near = (jnp.arange(k.shape[2]) < tokens)[None, None, None], _nearest(settings, tokens, k.shape[2])
        mask = masks.Mask(keys=keys, band=settings.window, whole=tokens, nearest=near)
    with using(replace(settings, pad_tokens=0)):
        return attention(q, k, v, mask=mask)


def _named(attend: Callable, near: Nearest | None) -> Callable:
    """`attend` jitted under a name by which the planner counts products; if sparse, it has the mean share of the video seen."""
    attend.__name__ = ATTENTION if near is None else f"{ATTENTION}_{near.share:.3f}"
    return jax.jit(attend)


def _nearest(settings: Settings, tokens: int, stop: int) -> Nearest | None:
    return settings.sparse and nearest(*settings.sparse, tokens, stop)


def _record(how: Dispatch):
    _dispatched[how] += 1
    if how.reason:
        warn_once(f"attention: {how.reason}; such calls run the slower {how.kernel}")


def _over_mesh(settings: Settings, local) -> dict:
    """Arguments of attention over chips. `interpret` is None unless `local` is our kernel: XLA then lays out what is exchanged."""
    ours = getattr(local, "func", None) in (kernel.tpu_attention, differentiable_attention)
    interpret = settings.interpreted if ours else None
    return {"mesh": settings.mesh, "local": local, "ring": settings.ring, "interpret": interpret}


def _dispatch(settings: Settings, q, k, v, mask) -> tuple[Callable, Dispatch]:
    """(attention over all chips, its `Dispatch`)."""
    name, local, reason = _local(settings, q, k, v, mask)
    run, chips = _spread(settings, q, k, mask, local)
    return run, Dispatch(q.shape, k.shape, str(q.dtype), "" if mask is None else mask.kind, name, chips, reason)


def _attended(settings: Settings, q, k, v, mask: masks.Mask | None, scale: float) -> Out:
    """Attention over all chips by the kernel for these arrays, with `Mask.product` in the scores."""
    *operands, left = masks.in_scores(q, k, v, mask=mask, scale=scale)
    run, _ = _dispatch(settings, *operands, left)
    return run(*operands, mask=left, scale=scale)


_program = jax.jit(_attended, static_argnames=("settings", "scale"))  # for calls outside of a trace


def _local(settings: Settings, q, k, v, mask):
    """(name, attention on one chip, reason) by `Settings.kernel`; "auto": the kernel on TPU, else the reference (`reason`: why)."""
    name, auto = settings.kernel, settings.kernel == "auto"
    if auto:
        name = "kernel" if settings.platform == "tpu" else "reference"
    run, unsupported = KERNELS[name](settings)
    reason = unsupported(q, k, v, mask)
    if reason is None:
        return name, run, ""
    if auto:
        return "reference", _plain(settings)[0], f"{name} does not take {reason}"
    raise NotImplementedError(f"attention {name!r} does not take {reason}; use 'auto' or 'reference'")


def _ours(settings: Settings, **fixed):
    fixed |= {"generation": settings.generation, "wanted": settings.blocks, "smoothing": settings.smoothing}
    attention = differentiable_attention if settings.differentiable else kernel.tpu_attention
    run = functools.partial(attention, tally=settings.tally, interpret=settings.interpreted, **fixed)
    return run, kernel.unsupported


def _stock(settings: Settings):
    how = {"interpret": settings.interpreted, "blocks": settings.blocks, "differentiable": settings.differentiable}
    return functools.partial(splash.splash_attention, **how), splash.unsupported


def _plain(settings: Settings):
    again = settings.differentiable
    run = functools.partial(reference_attention, again=True) if again else reference_attention
    return run, lambda q, k, v, mask: None


# Name -> function of the settings: (attention on one chip, function that says why it does not support a call, or None).
KERNELS: dict[str, Callable[[Settings], tuple[Callable, Callable]]] = {
    "kernel": _ours,
    "online": functools.partial(_ours, modes=(ONLINE,)),
    "splash": _stock,
    "reference": _plain,
}


def _spread(settings: Settings, q, k, mask, local):
    """(attention over all chips, `Dispatch.chips`)."""
    mesh = settings.mesh
    if settings.chips == 1:
        return local, "one chip"
    if not settings.sequence or q.shape[2] < mesh.shape["sp"]:
        return functools.partial(attention_by_heads, mesh=mesh, local=local), "by heads"
    spread = functools.partial(parallel_attention, **_over_mesh(settings, local))
    if has_many_keys(mesh, q, k, mask):
        return spread, f"heads over {mesh.shape['sp']}, all queries"
    if q.shape[2] != k.shape[2]:
        return spread, f"queries over {mesh.shape['sp']}, whole keys"
    split = split_over(mesh, q, k, settings.ring, mask)
    return spread, f"ring {split.ring} x ulysses {split.ulysses}"


def _check(q, k, v, enable_gqa):
    shapes = f"{q.shape}, {k.shape}, {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"expected q, k, v of four axes, got {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"expected q [B, N, T, D], k [B, K, S, D], v [B, K, S, E], got {shapes}")
    if q.shape[1] != k.shape[1] and (not enable_gqa or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"expected as many key heads as query heads, or enable_gqa with a divisor of them, got {q.shape[1]} query and"
            f" {k.shape[1]} key heads, enable_gqa={enable_gqa}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"expected one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}")
