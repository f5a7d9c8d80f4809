"""AnimateDiff's UNet on TPU: sharded over the width of the maps, as Stable Diffusion's; frames are not sharded."""

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
