"""What video VAEs in Flax NNX share, with no model in it.

autoencoder   the class: where weights come from, settings, tiles and slices, one program per shape
layers        convolution, norm, blocks, and a chunk of frames on its way through them
weights       upstream's config and weights, from its files or its module
"""
