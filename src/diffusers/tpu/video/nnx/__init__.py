"""What video VAEs in Flax NNX share: `autoencoder` the class, `layers`, `weights` of upstream's files or module."""
