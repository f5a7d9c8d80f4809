"""What video VAEs on TPU are made of, in JAX: frames in chunks, columns in slabs, maps in tiles, convolution by columns,
attention by frame.

chunks        a causal model's loop over frames as one scan
slabs         a map over chips, with exact edges
tiles         a map in overlapping tiles, as upstream's `enable_tiling`
attention     in which a frame sees itself and those before it
convolution   in the form that the TPU compiler makes fast
nnx           Flax NNX modules of all this: layers, weights, the class; imports flax, so that nothing here imports it
"""
