"""AnimateDiff's UNet on TPU: split over the width of the maps, as that of Stable Diffusion; each position's frames are on one chip."""

from .unet_2d_condition_flax import BLOCKS, plan_of_maps
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


BLOCKS_OF_MOTION = (
    CrossAttnDownBlockMotion,
    CrossAttnUpBlockMotion,
    DownBlockMotion,
    UNetMidBlockCrossAttnMotion,
    UpBlockMotion,
)
PLAN = plan_of_maps(
    UNetMotionModel, UNetMotionOutput, known=BLOCKS + BLOCKS_OF_MOTION, of_frames=(AnimateDiffTransformer3D,)
)
