"""Attention: one function (`api.attention`), what masks are, kernels for one chip, and attention over a mesh."""
