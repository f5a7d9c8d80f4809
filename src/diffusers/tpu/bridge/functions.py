"""Functions of torch's that no mode dispatches, for device tensors; of host tensors they are torch's."""

import functools

import jax
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torchax.tensor import Tensor

from .host_values import DEVICE_TENSORS


def register(env):
    """Put every function of this file in the place of torch's, once."""
    if getattr(torch.vmap, "func", None) is not vmap:
        torch.vmap = functools.partial(vmap, torch.vmap, env)


def vmap(theirs, env, func, in_dims=0, out_dims=0, **options):
    """Of device tensors JAX's: what torch's wraps them in is no device tensor. Masks of transformers' are made by it."""

    def mapped(*args, **kwargs):
        if not any(isinstance(x, DEVICE_TENSORS) for x in tree_leaves(args)):
            return theirs(func, in_dims, out_dims, **options)(*args, **kwargs)

        def of_arrays(*arrays):
            return to_arrays(func(*to_tensors(arrays), **kwargs))

        return to_tensors(jax.vmap(of_arrays, in_dims, out_dims)(*to_arrays(args)))

    to_arrays = functools.partial(tree_map_only, torch.Tensor, lambda x: env.moved(x).jax())
    to_tensors = functools.partial(tree_map_only, jax.Array, lambda x: Tensor(x, env))
    return mapped
