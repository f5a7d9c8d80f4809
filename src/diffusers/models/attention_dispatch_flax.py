"""Attention on TPU: the dispatcher's backends, and functions that the models' attention processors call in a trace."""

import torch
import torch.nn.functional as F

from ..tpu.bridge import Tensor, autocast, environment, on_device
from ..tpu.kernels import rotary
from ..tpu.kernels.attention.api import among_latents, joint
from ..tpu.kernels.attention.joint import Text
from ..tpu.kernels.norm import Norm
from ..tpu.kernels.settings import choosing, current
from .attention_dispatch import AttentionBackendName, _AttentionBackendRegistry


def dispatched_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask=None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
) -> torch.Tensor:
    """The dispatcher's TPU backends, [B, T, N, D] in and out; a mask [B, S] is a key mask, as for NATIVE.

    `kernel` as `TPUConfig.attention`. Raises NotImplementedError for `return_lse`, RuntimeError for host tensors.
    """
    if return_lse:
        raise NotImplementedError("expected return_lse=False: the TPU attention backend gives no log-sum-exp")
    if not on_device(query):
        raise RuntimeError(
            f"expected tensors on the TPU path, got {query.device}: run the model through a pipeline on the TPU path, or"
            ' set_attention_backend("native") for plain torch'
        )
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    query, key, value, attn_mask = autocast.lowered(query, key, value, attn_mask)
    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    with choosing(kernel):
        how = {"scale": scale, "enable_gqa": enable_gqa}
        out = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **how)
    return out.permute(0, 2, 1, 3)


def joint_attention(
    latents: tuple[torch.Tensor, ...], text: tuple[torch.Tensor, ...], seen: torch.Tensor | None, backend=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of two streams in one softmax: traced q, k and v [B, T, N, D] of each. Returns both results [B, T, N, D].

    `seen` [B, L]: false for padding of the text; `backend`: the processor's (None: the dispatcher's active one), of which those of
    the TPU override `TPUConfig.attention`.
    """
    (q, k, v), words = ([x.jax().swapaxes(1, 2) for x in autocast.lowered(*stream)] for stream in (latents, text))
    backend = AttentionBackendName(backend or _AttentionBackendRegistry._active_backend).value
    with choosing(backend.removeprefix("tpu_") if backend.startswith("tpu_") else None):
        answers = joint(q, k, v, Text(*words, None if seen is None else seen.jax().astype(bool)))
    return tuple(Tensor(x.swapaxes(1, 2), environment()) for x in answers)


def latent_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Self-attention of latents: traced q, k and v [B, T, N, D], and a result [B, T, N, D]."""
    answer = among_latents(*(x.jax().swapaxes(1, 2) for x in autocast.lowered(q, k, v)))
    return Tensor(answer.swapaxes(1, 2), environment())


def normed_and_rotated(x: torch.Tensor, norm: torch.nn.Module, *tables: torch.Tensor, apart=False) -> torch.Tensor:
    """`norm(x)` of a traced x [B, T, C], with each head's pairs of entries rotated by cos and sin [1 or B, T, 1, D], if given.

    `norm`: RMS or layer norm over all of C, or over each head; `apart`: pairs are half a head apart, not neighbours.
    """
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if norm.eps is None else norm.eps
    bias = getattr(norm, "bias", None)
    centred = isinstance(norm, torch.nn.LayerNorm)
    ours = Norm(norm.weight.jax(), eps, None if bias is None else bias.jax(), centred)
    tables = (table.jax()[:, :, 0] for table in tables)
    tables = tuple(table[0] if len(table) == 1 else table for table in tables)
    return Tensor(rotary.normed_and_rotated(x.jax(), ours, tables, current(), apart), environment())


class Replacement:
    """A processor in a trace, in place of `upstream`, which runs what it does not cover."""

    def __init__(self, upstream):
        self.upstream = upstream


class RotatingNorms:
    """Wraps an attention so that its norms of queries and keys also rotate, by tables as `normed_and_rotated` takes them.
    Upstream's processor gets it in place of the attention, and no rotary embedding."""

    def __init__(self, attn: torch.nn.Module, queries: tuple, keys: tuple):
        self.attn, self.queries, self.keys = attn, queries, keys

    def __getattr__(self, name):
        return getattr(self.attn, name)

    def norm_q(self, query):
        return normed_and_rotated(query, self.attn.norm_q, *self.queries)

    def norm_k(self, key):
        return normed_and_rotated(key, self.attn.norm_k, *self.keys)


def filled(table: torch.Tensor) -> torch.Tensor:
    """A traced table [T, D] of the latents, with rows of zeros for padding tokens (`Settings.pad_tokens`)."""
    return torch.nn.functional.pad(table, (0, 0, 0, current().pad_tokens)) if current().pad_tokens else table
