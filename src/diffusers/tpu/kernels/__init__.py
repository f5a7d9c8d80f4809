"""Attention, linear layers, rotary embedding and convolution: JAX arrays in, JAX arrays out."""
