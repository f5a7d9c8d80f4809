"""What video VAEs on TPU are made of, in JAX: frames in chunks, columns in slabs, maps in tiles, convolution by columns.

chunks        a causal model's loop over frames as one scan
slabs         a map over chips, with exact edges
tiles         a map in overlapping tiles, as upstream's `enable_tiling`
convolution   in the form that the TPU compiler makes fast
"""
