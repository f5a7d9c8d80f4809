"""Attention: one function (`api.attention`), what masks are, kernels for one chip, and the ways over a mesh."""
