"""torch functions that no dispatch mode intercepts, for device tensors; host tensors go to torch's own."""

import functools

import jax
import torch
from torch.nn.attention import flex_attention as flex
from torch.utils._pytree import tree_leaves, tree_map_only
from torchax.tensor import Tensor

from .operators import scaled_dot_product_attention


def register(env):
    """Replace torch's functions by those of this file, once."""
    for module, ours in ((torch, vmap), (flex, flex_attention)):
        theirs = getattr(module, ours.__name__)
        if getattr(theirs, "func", None) is not ours:
            setattr(module, ours.__name__, functools.partial(ours, theirs, env))


def vmap(theirs, env, func, in_dims=0, out_dims=0, randomness="error", **options):
    """`jax.vmap` for device tensors: torch's would wrap them in another class. transformers makes its masks with `torch.vmap`.

    All entries are mapped at once, whatever the `chunk_size`. Raises RuntimeError for a function that draws random numbers, unless
    the `randomness` is "same".
    """

    def mapped(*args, **kwargs):
        if not any(isinstance(x, Tensor) for x in tree_leaves(args)):
            return theirs(func, in_dims, out_dims, randomness, **options)(*args, **kwargs)
        draws = env.draws

        def of_arrays(*arrays):
            result = to_arrays(func(*to_tensors(arrays), **kwargs))
            if env.draws > draws and randomness != "same":
                raise RuntimeError(
                    f"expected torch.vmap(..., randomness='same') for a function that draws random numbers, got '{randomness}':"
                    " draw them outside of vmap, and give them to the function"
                )
            return result

        return to_tensors(jax.vmap(of_arrays, in_dims, out_dims)(*to_arrays(args)))

    to_arrays = functools.partial(tree_map_only, torch.Tensor, lambda x: env.moved(x).jax())
    to_tensors = functools.partial(tree_map_only, jax.Array, lambda x: Tensor(x, env))
    return mapped


def flex_attention(theirs, env, query, key, value, score_mod=None, block_mask=None, scale=None, *args, **kwargs):
    """SDPA with the dense mask of `block_mask`: `mask_mod` in its partial blocks, all entries of its full ones."""
    wanted = (score_mod, kwargs.get("return_lse") or None, kwargs.get("return_aux"))
    if not isinstance(query, Tensor) or args or wanted != (None, None, None):
        return theirs(query, key, value, score_mod, block_mask, scale, *args, **kwargs)
    mask = None
    if block_mask is not None:
        sizes = (*query.shape[:3], key.shape[2])
        places = (torch.arange(n, device=query.device).view(-1, *[1] * (3 - i)) for i, n in enumerate(sizes))
        mask = _entries(block_mask, "kv", sizes) & block_mask.mask_mod(*places)
        if block_mask.full_kv_num_blocks is not None:
            mask = mask | _entries(block_mask, "full_kv", sizes)
    enable_gqa = kwargs.get("enable_gqa", False)
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


def _entries(block_mask, kind: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """Whether each entry [B or 1, N or 1, Q, S] lies in a block of this kind, "kv" (partial) or "full_kv"."""
    counts, indices = (getattr(block_mask, f"{kind}_{of}") for of in ("num_blocks", "indices"))
    numbers = torch.arange(indices.shape[-1], device=indices.device)
    named = (indices[..., None] == numbers) & (numbers < counts[..., None])[..., None]
    rows, columns = block_mask.BLOCK_SIZE
    entries = named.any(-2).repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return entries[..., : sizes[2], : sizes[3]]
