"""The ControlNet of Stable Diffusion and SDXL on TPU: split over the width of the maps, as the UNet that takes its residuals."""

from ..unets.unet_2d_condition_flax import by_shards, plan_of_maps
from .controlnet import ControlNetModel, ControlNetOutput


def _forward(net, *args, **kwargs):
    blocks = *net.down_blocks, net.mid_block
    outputs, by_name = by_shards(net, blocks, ("sample", "controlnet_cond"), *args, **kwargs)
    return ControlNetOutput(*outputs) if by_name else outputs


PLAN = plan_of_maps(ControlNetModel, _forward)
