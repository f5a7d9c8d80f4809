"""The programs of the attention kernel as text, without places in the source: to see that a rearrangement changes nothing.

    python tests/tpu/kernel_text.py DIRECTORY

writes one file a call, StableHLO and the kernel's own Mosaic, lowered for a TPU, and prints their digests. Run it on two
trees and `diff -r` the directories.
"""

import hashlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax._src import tpu_custom_call

from diffusers.tpu.kernels.attention.kernel import tpu_attention
from diffusers.tpu.kernels.attention.masks import Mask


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


B, N, T, S = 2, 4, 700, 1100
BOOL, BF16 = jnp.bool_, jnp.bfloat16
MASKS = {
    "keys": {"keys": array(B, 1, 1, S, dtype=BOOL)},
    "keys-by-head": {"keys": array(B, N, 1, S, dtype=BOOL)},
    "key-bias": {"keys": array(1, N, 1, S)},
    "outer": {"keys": array(B, 1, 1, S, dtype=BOOL), "queries": array(B, 1, T, 1, dtype=BOOL)},
    "causal": {"band": (None, 0)},
    "window": {"band": (100, 30)},
    "dense": {"dense": array(1, 1, T, S, dtype=BOOL)},
    "bias": {"dense": array(B, N, T, S, dtype=BF16)},
    "all": {"keys": array(1, N, 1, S), "queries": array(B, 1, T, 1, dtype=BOOL), "dense": array(1, N, T, S, dtype=BOOL), "band": (300, 20)},
}  # fmt: skip
CALLS = {  # name: heads of keys, head size, dtype, mask, further arguments
    "plain": (N, 128, BF16, None, {}),
    "plain-64": (N, 64, BF16, None, {}),
    "plain-80": (N, 80, BF16, None, {}),
    "float32": (N, 128, jnp.float32, None, {}),
    "float32-64": (2, 64, jnp.float32, None, {"with_lse": True}),
    "gqa": (2, 128, BF16, None, {}),
    "gqa-keys": (2, 128, BF16, "keys", {"with_lse": True}),
    "gqa-by-head": (1, 64, BF16, "keys-by-head", {}),
    "lse": (N, 128, BF16, None, {"with_lse": True}),
    "v5e": (N, 64, BF16, None, {"generation": "v5e"}),
    "v7x": (N, 128, BF16, "keys", {"generation": "v7x"}),
    "bound": (N, 128, BF16, None, {"ways": ("bound",)}),
    "centred": (N, 128, BF16, None, {"ways": ("centred",)}),
    "online": (N, 128, BF16, None, {"ways": ("online",)}),
    "rough": (N, 128, BF16, None, {"smoothing": False}),
    "wanted": (N, 128, BF16, None, {"wanted": (512, 512, 256)}),
    "negative": (N, 128, BF16, "keys", {"scale": -0.3}),
    "ring": (N, 128, BF16, "window", {"first_row": array(dtype=jnp.int32), "first_key": array(dtype=jnp.int32), "with_lse": True}),
    **{f"mask-{name}": (2, 128, BF16, name, {}) for name in MASKS},
    **{f"mask-{name}-float32": (N, 64, jnp.float32, name, {"with_lse": True}) for name in MASKS},
}  # fmt: skip


def text_of(kv_heads, dim, dtype, mask, more) -> str:
    """StableHLO with the kernel's body taken out, then that body."""
    bodies, serialize = [], tpu_custom_call._lower_mosaic_module_to_asm

    def record(module, **arguments):
        bodies.append(module.operation.get_asm(enable_debug_info=False))
        return serialize(module, **arguments)

    tpu_custom_call._lower_mosaic_module_to_asm = record
    arrays = {name: x for name, x in more.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {"scale": dim**-0.5, "generation": "v6e"}
    static |= {name: x for name, x in more.items() if name not in arrays}

    def call(q, k, v, mask, arrays):
        return tpu_attention(q, k, v, mask=mask, **static, **arrays)

    q, k = array(B, N, T, dim, dtype=dtype), array(B, kv_heads, S, dim, dtype=dtype)
    mask = None if mask is None else Mask(**MASKS[mask])
    try:
        lowered = jax.jit(call).trace(q, k, k, mask, arrays).lower(lowering_platforms=("tpu",))
    finally:
        tpu_custom_call._lower_mosaic_module_to_asm = serialize
    around, count = re.subn(r"body\\22: \\22[^\\]*\\22", "body", lowered.as_text())
    assert count == len(bodies) == 1
    return around + bodies[0]


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, call in CALLS.items():
        text = text_of(*call)
        (directory / f"{name}.mlir").write_text(text)
        print(f"{name:24} {len(text):8} {hashlib.sha256(text.encode()).hexdigest()[:16]}")
