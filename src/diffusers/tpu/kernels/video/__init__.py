"""What video VAEs are made of, in JAX: chunks of frames, halo exchange over the width, tiles, group norm, convolution."""
