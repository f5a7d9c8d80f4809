"""What video VAEs are made of, in JAX: chunks of frames, halo exchange over the width, tiles.

chunks        a causal model's loop over frames as one scan
halo          a map over chips, with exact edges; attention in which a frame sees itself and those before it
tiles         a map in overlapping tiles, as upstream's `enable_tiling`
norm          group norm, with the statistics of the whole map
convolution   in the form that the TPU compiler makes fast
"""
