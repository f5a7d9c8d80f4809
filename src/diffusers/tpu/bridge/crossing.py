"""Values between torch's host tensors and JAX's or numpy's arrays, to the last bit."""

import jax
import numpy as np
import torch
from torchax.ops import mappings

from ..checkpoint import values
from ..hosts import whole
from ..locks import exclusive


def as_numpy(t: torch.Tensor, own: bool = False) -> np.ndarray:
    """A host tensor's values without a copy where it is contiguous; bfloat16 and float8 keep their bits.

    `own`: in memory of their own, for a JAX array of theirs: JAX's CPU backend takes memory as it is, others read it when the call
    is over, and what is written into the tensor meanwhile would be in the array.
    """
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        t = values(t).clone(memory_format=torch.contiguous_format) if own else values(t).contiguous()
        dtype = mappings.NUMPY_UNSUPPORTED_DTYPES.get(t.dtype)
        if dtype is None:
            return t.numpy()
        integer = torch.int16 if t.dtype.itemsize == 2 else torch.int8
        return t.view(integer).numpy().view(np.dtype(dtype))


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype that a host tensor of this dtype has on the device: 64-bit numbers become 32-bit."""
    return jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(dtype))


def from_numpy(x) -> torch.Tensor:
    """A JAX or numpy array as a host tensor of its own; bfloat16 and float8 keep their bits."""
    values = np.array(whole(_computed(x)))
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        dtype = mappings.j2t_dtype(values.dtype)
        if dtype in mappings.NUMPY_UNSUPPORTED_DTYPES:
            return torch.from_numpy(values.view(np.int16 if values.itemsize == 2 else np.int8)).view(dtype)
        return torch.from_numpy(values)


def _computed(x):
    """The array when the chips have computed it; other threads may launch programs until then."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_ready():
        with exclusive.released():
            x.block_until_ready()
    return x
