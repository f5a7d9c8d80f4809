"""AnimateDiff's UNet on TPU: sharded over the width of the maps, as Stable Diffusion's; frames are not sharded."""

from . import unet_motion_model as motion
from .unet_2d_condition_flax import BLOCKS, plan_of_maps


BLOCKS_OF_MOTION = (
    motion.CrossAttnDownBlockMotion,
    motion.CrossAttnUpBlockMotion,
    motion.DownBlockMotion,
    motion.UNetMidBlockCrossAttnMotion,
    motion.UpBlockMotion,
)
PLAN = plan_of_maps(
    motion.UNetMotionModel,
    motion.UNetMotionOutput,
    known=BLOCKS + BLOCKS_OF_MOTION,
    of_frames=(motion.AnimateDiffTransformer3D,),
)
