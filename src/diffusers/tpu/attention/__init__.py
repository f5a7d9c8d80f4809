"""Attention: one function (`api.attention`), its reference, masks, and the way over a mesh."""


def dispatched(query, key, value, **kwargs):
    """The TPU backend of diffusers' attention dispatcher. Tensors [B, T, N, D]; see `bridge.dispatched_attention`."""
    from ..bridge import dispatched_attention

    return dispatched_attention(query, key, value, **kwargs)
