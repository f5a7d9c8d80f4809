"""What an attention mask is: checked against the scores it must cover, brought to four axes, named by kind."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


@dataclass(frozen=True)
class Mask:
    """A mask of the scores, each axis full or one: [B|1, N|1, T|1, S|1].

    `kind` is "keys" (the same for every query, so nothing of tokens x tokens exists) or "dense"; `values` are bool
    (True takes part) or a bias to be added to the scaled scores.
    """

    kind: str
    values: Bool[Array, "b n t s"] | Float[Array, "b n t s"]


def classify(mask, batch: int, heads: int, q_len: int, kv_len: int) -> Mask | None:
    """The mask as upstream may give it, or None where it takes nothing away (None itself; a host array of all True).

    Raises:
        ValueError: it does not broadcast to [batch, heads, q_len, kv_len].
        TypeError: neither bool nor floating.
    """
    if mask is None:
        return None
    target = (batch, heads, q_len, kv_len)
    if mask.ndim > 4 or any(m not in (1, t) for m, t in zip(mask.shape[::-1], target[::-1])):
        raise ValueError(
            f"expected an attention mask that broadcasts to [B, N, T, S] = {list(target)}, got {list(mask.shape)}"
        )
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise TypeError(f"expected a bool or floating attention mask, got {mask.dtype}; cast it with .to(torch.bool)")
    if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.all():
        return None
    values = jnp.asarray(mask).reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    return Mask("keys" if values.shape[2] == 1 else "dense", values)
