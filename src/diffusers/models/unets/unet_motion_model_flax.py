"""AnimateDiff's UNet on TPU: split over the width of the maps, as that of Stable Diffusion; each position's frames are on one chip."""

from .unet_2d_condition_flax import BLOCKS, RESIDUALS, by_shards, plan_of_maps
from .unet_motion_model import (
    AnimateDiffTransformer3D,
    CrossAttnDownBlockMotion,
    CrossAttnUpBlockMotion,
    DownBlockMotion,
    UNetMidBlockCrossAttnMotion,
    UNetMotionModel,
    UNetMotionOutput,
    UpBlockMotion,
)


MOTION = {
    CrossAttnDownBlockMotion,
    CrossAttnUpBlockMotion,
    DownBlockMotion,
    UNetMidBlockCrossAttnMotion,
    UpBlockMotion,
}


def _forward(unet, *args, **kwargs):
    blocks = *unet.down_blocks, unet.mid_block, *unet.up_blocks
    outputs, by_name = by_shards(unet, blocks, ("sample", *RESIDUALS), *args, known=BLOCKS | MOTION, **kwargs)
    return UNetMotionOutput(*outputs) if by_name else outputs


PLAN = plan_of_maps(UNetMotionModel, _forward, AnimateDiffTransformer3D)
