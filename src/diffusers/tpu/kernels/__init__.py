"""Attention, linear layers, rotary embedding, convolution and the parts of video VAEs: JAX arrays in, JAX arrays out."""
