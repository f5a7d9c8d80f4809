"""`torch.autocast` of device tensors: what an operator of torch's list is given is cast as CUDA's autocast casts it.

Operators that torch does not list, and what runs inside of one that it lists, take their tensors as they are. To what is cast, a thread's
`torch.autocast` notes (`idioms.compiling`); host tensors are torch's to cast.
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
    """What this thread casts to; None: autocast is off."""
    return casting.get()


def computing_in(dtype: torch.dtype | None) -> torch.autocast:
    """A context of autocast to this dtype, or without it."""
    return torch.autocast("cuda", dtype, enabled=dtype is not None)


def without():
    """`computing_in(None)` around one operator, which asks nobody."""
    return bound(casting, None)


def lowered(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What a product is given of these tensors."""
    dtype = dtype_now()
    return tensors if dtype is None else tree_map_only(torch.Tensor, lambda t: _cast(t, dtype), tensors)


def given(func, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments with which `func`, a function or an overload, runs without autocast; None: it is not of torch's list, or that is off."""
    dtype = dtype_now()
    kind = None if dtype is None else _kind(func)
    if kind is None:
        return None
    leaves = tree_leaves((args, kwargs))
    if kind == "float32":
        if any(isinstance(leaf, torch.dtype) for leaf in leaves):
            return args, kwargs  # the caller says in which
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
    """What CUDA's autocast of this torch casts for."""
    has, prefix = torch._C._dispatch_has_kernel_for_dispatch_key, "aten::"
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix))
    return frozenset(name.removeprefix(prefix).partition(".")[0] for name in names if has(name, "AutocastCUDA"))


def _takes_part(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not _takes_part(t) or t.dtype == dtype:
        return t
    if isinstance(t, Tensor):
        t.jax()  # a value that waited is computed before
    return recast(t, t.to(dtype))
