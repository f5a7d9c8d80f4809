"""`torch.autocast` for device tensors: arguments of the operators on torch's list are cast as CUDA's autocast casts them.

Operators that are not on the list, and those that run inside of a listed one, take their tensors as they are. The dtype is the one
that `torch.autocast` set for this thread (`idioms.compiling`). Torch itself casts host tensors.
"""

import functools

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torchax.tensor import Tensor

from ..idioms.compiling import casting
from ..kernels.settings import bound
from .layers import recast


LOWER = frozenset(
    "addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
    " convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell"
    " scaled_dot_product_attention".split()
)
WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot".split()
)
LISTED_AS = {  # functions and operators that have another name on torch's list
    **dict.fromkeys(("__matmul__", "__rmatmul__"), "matmul"),
    **dict.fromkeys(("__pow__", "__rpow__"), "pow"),
    **dict.fromkeys(("__rtruediv__", "__rdiv__"), "reciprocal"),
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_group_norm": "group_norm",
    "vector_norm": "linalg_vector_norm",
    "multi_dot": "linalg_multi_dot",
    "grid_sample": "grid_sampler",
    "interpolate": "upsample_nearest2d",
}


def dtype_now() -> torch.dtype | None:
    """The dtype that autocast casts to in this thread; None: autocast is off."""
    return casting.get()


def computing_in(dtype: torch.dtype | None) -> torch.autocast:
    """A context in which autocast casts to this dtype; None turns it off."""
    return torch.autocast("cuda", dtype, enabled=dtype is not None)


def without():
    """As `computing_in(None)`, but sets this module's dtype only and leaves torch's own state."""
    return bound(casting, None)


def lowered(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """These tensors, cast as autocast casts the arguments of a product."""
    dtype = dtype_now()
    return tensors if dtype is None else tree_map_only(torch.Tensor, lambda t: _cast(t, dtype), tensors)


def given(func, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments of `func`, a function or an overload, after autocast; None where it is off or `func` is not on torch's list."""
    dtype = dtype_now()
    kind = None if dtype is None else _kind(func)
    if kind is None:
        return None
    leaves = tree_leaves((args, kwargs))
    if kind == "float32":
        if any(isinstance(leaf, torch.dtype) for leaf in leaves):
            return args, kwargs  # the caller names the dtype
        dtype = torch.float32
    elif kind == "widest":
        dtypes = [leaf.dtype for leaf in leaves if _takes_part(leaf)] or [dtype]
        dtype = functools.reduce(torch.promote_types, dtypes)
    return tree_map_only(torch.Tensor, lambda t: _cast(t, dtype), (args, kwargs))


@functools.cache
def _kind(func) -> str | None:
    name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    name = LISTED_AS.get(name, name)
    if name in LOWER:
        return "lower"
    if name in WIDEST:
        return "widest"
    return "float32" if name in _listed() else None


@functools.cache
def _listed() -> frozenset[str]:
    """Names of the operators that CUDA's autocast has a rule for in the installed torch."""
    has, prefix = torch._C._dispatch_has_kernel_for_dispatch_key, "aten::"
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix))
    return frozenset(name.removeprefix(prefix).partition(".")[0] for name in names if has(name, "AutocastCUDA"))


def _takes_part(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not _takes_part(t) or t.dtype == dtype:
        return t
    if isinstance(t, Tensor):
        t.jax()  # computes a deferred tensor first
    return recast(t, t.to(dtype))
