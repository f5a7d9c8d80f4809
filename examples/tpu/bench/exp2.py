"""An attention kernel like those whose times others published: transposed scores, exp2, a running maximum. For calibration only.

It is not tuned, so that its schedule is that of the measured kernels and our computed seconds can be compared with theirs. As in theirs, the
compiler's LP scheduler is requested, weights and values are float32, and keys that pad the last block are not masked. Our own kernel is
`diffusers.tpu.kernels.attention.kernel`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from diffusers.tpu.kernels.attention.kernel_body import LOWEST
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.pallas import LANES, SUBLANES, round_up


BLOCKS = (2048, 2048, 256)
VMEM_BYTES = 100 << 20


def unsupported(q, k, v, mask: Mask | None) -> str | None:
    """Returns what the exp2 kernel does not support of this call, or None."""
    if q.shape[1] != k.shape[1]:
        return f"{q.shape[1]} query heads over {k.shape[1]} key heads"
    return None if mask is None else f"a mask ({mask.kind})"


def exp2_attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B N S D"],
    v: Float[Array, "B N S D"],
    *,
    scale: float,
    mask: Mask | None = None,
    first_row: int = 0,
    first_key: int = 0,
    with_lse: bool = False,
    blocks: tuple[int, int, int] | None = None,
    interpret: bool = False,
) -> Float[Array, "B N T D"]:
    """Returns attention in q's dtype on one chip; keys that pad the last block enter the softmax as zeros.

    `blocks`: queries, keys, and keys of one inner step. VMEM: two buffers of each block of q, k, v and the output, and
    per query D + 16 float32 of state. Raises NotImplementedError for what is `unsupported`, and for a ring's `with_lse`.
    """
    if reason := "log-sum-exps" if with_lse else unsupported(q, k, v, mask):
        raise NotImplementedError(f"the exp2 kernel does not take {reason}")
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    wanted_q, wanted_kv, inner = blocks or BLOCKS
    block_q, inner = min(wanted_q, round_up(q_len, LANES)), min(inner, round_up(kv_len, LANES))
    block_kv = min(wanted_kv, round_up(kv_len, inner))
    q = (q.astype(jnp.float32) * (scale * math.log2(math.e))).astype(q.dtype)
    q, k, v = (
        jnp.pad(x.reshape(batch * heads, n, dim), ((0, 0), (0, -n % block), (0, 0)))
        for x, n, block in ((q, q_len, block_q), (k, kv_len, block_kv), (v, kv_len, block_kv))
    )
    kv_blocks = k.shape[1] // block_kv
    kv_spec = pl.BlockSpec((None, block_kv, dim), lambda h, i, j: (h, j, 0))
    call = pl.pallas_call(
        functools.partial(_kernel, inner=inner, kv_blocks=kv_blocks),
        grid=(batch * heads, q.shape[1] // block_q, kv_blocks),
        in_specs=[pl.BlockSpec((None, block_q, dim), lambda h, i, j: (h, i, 0)), kv_spec, kv_spec],
        out_specs=pl.BlockSpec((None, dim, block_q), lambda h, i, j: (h, 0, i)),
        out_shape=jax.ShapeDtypeStruct((batch * heads, dim, q.shape[1]), q.dtype),
        scratch_shapes=[
            pltpu.VMEM((SUBLANES, block_q), jnp.float32),
            pltpu.VMEM((SUBLANES, block_q), jnp.float32),
            pltpu.VMEM((dim, block_q), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
            flags={"XLA_TPU_FORCE_LP_LLO_SCHEDULER": True},
        ),
        interpret=interpret,
        name="exp2_attention",
    )
    # The kernel's products are exact for bfloat16 operands; asked for more, the compiler refuses them.
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        out = call(q, k, v)
    return jnp.swapaxes(out, 1, 2)[:, :q_len].reshape(batch, heads, q_len, dim)


def _kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, inner: int, kv_blocks: int):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, LOWEST)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    q = q_ref[...]
    for start in range(0, k_ref.shape[0], inner):
        k, v = k_ref[start : start + inner, :], v_ref[start : start + inner, :].astype(jnp.float32)
        s = lax.dot_general(k, q, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        # State goes through VMEM at every inner step: kept in registers over the block it would spill.
        m = m_ref[...]
        m_next = jnp.maximum(m, s.max(axis=0)[None])
        rescale = jnp.exp2(m - m_next)
        p = jnp.exp2(s - m_next[:1])
        m_ref[...] = m_next
        l_ref[...] = l_ref[...] * rescale + p.sum(axis=0)[None]
        acc_ref[...] = acc_ref[...] * rescale[:1] + lax.dot_general(
            v, p, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    @pl.when(step == kv_blocks - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[:1]).astype(o_ref.dtype)
