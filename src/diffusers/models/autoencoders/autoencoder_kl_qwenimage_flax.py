"""Qwen-Image's VAE on TPU: the layers of Wan's, and so its plan, for an image as for a video."""

from .autoencoder_kl_qwenimage import AutoencoderKLQwenImage, QwenImageResample, QwenImageUpsample
from .autoencoder_kl_wan_flax import WanMaps
from .vae_maps_flax import Maps


class _Maps(WanMaps):
    def output(self, vae, sample, tiled, return_dict=True):
        """As upstream's, which does not clip values to [-1, 1] if it decodes in tiles."""
        if tiled:
            return Maps.output(self, vae, sample, tiled, return_dict)
        return super().output(vae, sample, tiled, return_dict)


PLAN = _Maps().plan_of(AutoencoderKLQwenImage, QwenImageResample, QwenImageUpsample)
