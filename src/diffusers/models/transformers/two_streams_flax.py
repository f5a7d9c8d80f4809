"""Shared by transformers of two streams on TPU: latents and text in one softmax.

Latents are sharded over the sequence, text is replicated. Upstream concatenates the streams, latents or text first, for attention
and in some blocks for every layer. Here each token's layers are computed in its own stream, and attention takes both streams
separately (`attention/joint.py`). Where both streams use the same layers, each chip concatenates its parts of them
(`together`), so that it reads a weight once. A model's own file has what its processor and blocks do differently.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import torch
from jax.sharding import PartitionSpec as P

from ...tpu.bridge import Tensor, environment
from ...tpu.chips.sharding import TOKENS
from ...tpu.compile.tracing import on_every_chip
from ...tpu.kernels.settings import current
from ..attention_dispatch_flax import Replacement, filled, joint_attention, latent_attention, normed_and_rotated


LATENTS, TEXT = TOKENS, P("dp", None, None)  # activations between blocks

REPLICATED = (r"^context_embedder(_2)?$", r"\bff_context$")  # layers of the text, which is replicated too


class TwoStreamProcessor(Replacement):
    """Latents and text in one softmax without a concatenation; norm and rotation of each in one pass.

    Text has projections of its own (`add_q_proj`, ..., `to_add_out`), or uses those of the latents. Calls that this processor does
    not cover run `upstream`, the processor that it replaces.

    Attributes:
        masks_words: upstream's mask covers words. False: it covers pairs of tokens; pipelines pass none, and `upstream` takes it.
    """

    masks_words = True

    def seen(self, attention_mask, tokens: int):
        """The mask [B, L] of words that are not padding, from upstream's mask for `tokens` latents; None: all words."""
        return attention_mask

    def tables(self, rotary, words: int) -> tuple[tuple, tuple]:
        """Cos and sin [T, D] of the latents, and those [L, D] of `words` words; empty for a stream that is not rotated."""
        return tuple(rotary or ()), ()

    def projected(self, attn, x, added: bool) -> Iterable:
        """Queries, keys and values [B, T, C] of one stream. `added`: by the text's own projections."""
        own = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj) if added else (attn.to_q, attn.to_k, attn.to_v)
        return (project(x) for project in own)

    def prepared(self, x, norm, tables):
        """Queries or keys [B, T, C]: normed, and rotated by tables [1, T, 1, D], if any."""
        return normed_and_rotated(x, norm, *tables)

    def covers(self, attn) -> bool:
        """Whether `prepared` supports this attention's norms. Latents may then end in padding tokens (`Settings.pad_tokens`)."""
        return all(getattr(norm, "weight", None) is not None for norm in self.norms(attn))

    def norms(self, attn) -> tuple:
        """The norms of the latents' queries and keys, then of the text's."""
        own = attn.norm_q, attn.norm_k
        return (*own, attn.norm_added_q, attn.norm_added_k) if _has_added(attn) else (*own, *own)

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        of_pairs = attention_mask is not None and not self.masks_words
        if encoder_hidden_states is None or of_pairs or not self.covers(attn):
            return self.upstream(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        tokens = hidden_states.shape[1] - current().pad_tokens
        seen = None if attention_mask is None else self.seen(attention_mask, tokens)
        return self.joined(attn, hidden_states, encoder_hidden_states, seen, image_rotary_emb)

    def joined(self, attn, hidden_states, encoder_hidden_states, seen, rotary) -> tuple:
        """(result of the latents, of the text). `rotary`: what `tables` takes."""
        tables, of_text = self.tables(rotary, encoder_hidden_states.shape[1])
        tables = [filled(table)[None, :, None] for table in tables]
        of_text = [table[None, :, None] for table in of_text]
        added, norms = _has_added(attn), self.norms(attn)
        latents = self.heads(attn, self.projected(attn, hidden_states, False), norms[:2], tables)
        with on_every_chip():
            text = self.heads(attn, [*self.projected(attn, encoder_hidden_states, added)], norms[2:], of_text)
        answers = joint_attention(latents, text, seen, getattr(self.upstream, "_attention_backend", None))
        hidden_states, encoder_hidden_states = (x.flatten(2, 3).type_as(latents[0]) for x in answers)
        out = getattr(attn, "to_out", None)
        if out is not None:
            hidden_states = out[1](out[0](hidden_states))
        out = getattr(attn, "to_add_out", None) if added or out is None else out[0]
        if out is not None:
            with on_every_chip():
                encoder_hidden_states = out(encoder_hidden_states)
        return hidden_states, encoder_hidden_states

    def heads(self, attn, projected: Iterable, norms: tuple, tables: list) -> tuple:
        """Queries, keys and values [B, T, N, D] of one stream."""
        prepared = [self.prepared(x, norms[n], tables) if n < len(norms) else x for n, x in enumerate(projected)]
        return tuple(x.unflatten(2, (attn.heads, -1)) for x in prepared)


def _has_added(attn) -> bool:
    return getattr(attn, "add_q_proj", None) is not None


def single_block(block, streams: tuple, modulations: list, **attention) -> tuple:
    """(latents, text) after a block whose attention and feed-forward are parallel after one norm, computed stream by stream.

    `streams`: latents and text [B, T, C]; `modulations`: shift, scale and gate of each; `attention`: arguments of its attention.
    """
    normed = [block.norm.norm(x) * (1 + scale) + shift for x, (shift, scale, _) in zip(streams, modulations)]
    answers = block.attn(hidden_states=normed[0], encoder_hidden_states=normed[1], **attention)
    latents, text = zip(normed, answers, streams, modulations)
    with on_every_chip():
        text = _single_end(block, *text)
    return _single_end(block, *latents), text


def joined_block(block, streams: tuple, parts: tuple, rotary) -> tuple:
    """As `single_block`, of both streams as one sequence. `parts`: shift, scale and gate of both; `rotary`: for `tables`."""
    attn, words = block.attn, streams[1].shape[1]
    processor, (shift, scale, _) = attn.processor, parts
    both = together(*streams)
    x = block.norm.norm(both) * (1 + scale) + shift
    tables = [together(*pair)[None, :, None] for pair in zip(*processor.tables(rotary, words))]
    heads = processor.heads(attn, processor.projected(attn, x, False), processor.norms(attn)[:2], tables)
    answer = latent_attention(*heads).flatten(2, 3).type_as(heads[0])
    return apart(_single_end(block, x, answer, both, parts), words)


def can_be_joined(processor, attn, streams: tuple) -> bool:
    """Whether both streams [B, T, C] can be one sequence: `sp` divides their tokens; no padding tokens, window or backend."""
    settings, backend = current(), getattr(processor.upstream, "_attention_backend", None)
    whole = settings.pad_tokens == 0 and settings.window is None and backend is None and processor.covers(attn)
    chips = 1 if settings.mesh is None else settings.mesh.shape["sp"]
    divided = all(x.shape[1] and x.shape[1] % chips == 0 for x in streams)
    return whole and divided and (settings.chips == 1 or settings.sequence)


def together(latents, text):
    """Both streams [B, T, C], or their tables [T, D], as one sequence: on each chip its latents, then its part of the text."""
    return _by_chip(lambda *streams: jnp.concatenate(streams, -2), latents, text)


def apart(both, words: int) -> tuple:
    """The inverse of `together`: latents and text."""
    mesh = current().mesh
    own = words if mesh is None else words // mesh.shape["sp"]
    return _by_chip(lambda x: (x[..., :-own, :], x[..., -own:, :]), both)


def _by_chip(run, *streams):
    """`run` on each chip's part of sequences [B, T, C] or [T, D]."""
    mesh, arrays = current().mesh, [x.jax() for x in streams]
    if mesh is not None and mesh.size > 1:
        batch = ("dp" if arrays[0].shape[0] % mesh.shape["dp"] == 0 else None,) if arrays[0].ndim == 3 else ()
        spec = P(*batch, "sp")
        run = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec, check_vma=False)
    return jax.tree.map(lambda x: Tensor(x, environment()), run(*arrays))


def _single_end(block, x, answer, own, modulation):
    """The layers of a single block that follow attention, for one stream."""
    wide = torch.cat([answer, block.act_mlp(block.proj_mlp(x))], dim=2)
    return modulation[-1] * block.proj_out(wide) + own


def modulation(norm, temb) -> tuple:
    """The parts that a modulated norm computes from its embedding, in its order, each [B, 1, C]."""
    return parts_of(norm, norm.linear(norm.silu(temb))[:, None])


def parts_of(norm, of_all) -> tuple:
    """The parts of C channels each, of the output [B, T, n C] of a modulated norm's layer."""
    return of_all.chunk(norm.linear.out_features // norm.linear.in_features, dim=2)
