"""Flux 2's VAE on TPU: the layers of `AutoencoderKL`, and so its plan."""

from .autoencoder_kl_flax import plan_of_images
from .autoencoder_kl_flux2 import AutoencoderKLFlux2


PLAN = plan_of_images(AutoencoderKLFlux2)
