"""The UNet of ModelScope's and Zeroscope's videos on TPU: sharded over the width of the maps, as Stable Diffusion's; frames are not
sharded."""

from ..transformers.transformer_temporal import TransformerTemporalModel
from . import unet_3d_blocks as blocks
from .unet_2d_condition_flax import plan_of_maps
from .unet_3d_condition import UNet3DConditionModel, UNet3DConditionOutput


BLOCKS = (
    blocks.CrossAttnDownBlock3D,
    blocks.CrossAttnUpBlock3D,
    blocks.DownBlock3D,
    blocks.UNetMidBlock3DCrossAttn,
    blocks.UpBlock3D,
)
PLAN = plan_of_maps(UNet3DConditionModel, UNet3DConditionOutput, known=BLOCKS, of_frames=(TransformerTemporalModel,))
