"""Attention: one function (`api.attention`), what masks are, kernels for one chip, and the ways over a mesh."""


def dispatched(query, key, value, **kwargs):
    """The TPU backends of diffusers' attention dispatcher. Tensors [B, T, N, D]; see `bridge.dispatched_attention`."""
    from ..bridge import dispatched_attention

    return dispatched_attention(query, key, value, **kwargs)
