"""Bit-exact conversion between torch's host tensors and JAX's or numpy's arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..chips.hosts import whole
from ..chips.locks import exclusive
from .checkpoint import values


def as_numpy(t: torch.Tensor, own: bool = False) -> np.ndarray:
    """A host tensor's values, without a copy if it is contiguous; bfloat16 and float8 keep their bits. `own`: in separate memory,
    for a JAX array: backends use memory without a copy, or read it later, after further writes to the tensor."""
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        t = values(t).clone(memory_format=torch.contiguous_format) if own else values(t).contiguous()
        dtype = _same(t.dtype)
        if dtype.isbuiltin == 1:  # 2: registered, as those of ml_dtypes
            return t.numpy()
        return t.view(getattr(torch, f"int{8 * t.itemsize}")).numpy().view(dtype)


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype that a host tensor of this dtype has on the device: 64-bit numbers become 32-bit."""
    return jax.dtypes.canonicalize_dtype(_same(dtype))


def _same(dtype: torch.dtype) -> np.dtype:
    """The dtype of the same name in numpy or ml_dtypes."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def from_numpy(x) -> torch.Tensor:
    """A JAX or numpy array copied to a host tensor; bfloat16 and float8 keep their bits."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_ready():
        with exclusive.released():  # other threads may launch programs until the chips have computed it
            x.block_until_ready()
    values = np.array(whole(x))
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        if values.dtype.isbuiltin == 1:
            return torch.from_numpy(values)
        return torch.from_numpy(values.view(f"i{values.itemsize}")).view(getattr(torch, values.dtype.name))
