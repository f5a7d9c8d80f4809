"""Qwen-Image's VAE on TPU: the layers of Wan's, and so its plan, for an image as for a video."""

from .autoencoder_kl_qwenimage import AutoencoderKLQwenImage, QwenImageResample, QwenImageUpsample
from .autoencoder_kl_wan_flax import plan_of_wans, tiles_decoded
from .vae import DecoderOutput


def _tiled_decode(vae, z, return_dict=True):
    """As upstream's, which leaves values beyond [-1, 1] as they are where it decodes in tiles."""
    sample = tiles_decoded(vae, z)
    return DecoderOutput(sample=sample) if return_dict else (sample,)


PLAN = plan_of_wans(
    AutoencoderKLQwenImage,
    QwenImageResample,
    QwenImageUpsample,
    methods={(AutoencoderKLQwenImage, "tiled_decode"): _tiled_decode},
)
