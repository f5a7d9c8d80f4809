"""Stable Video Diffusion's UNet on TPU: sharded over the width of the maps, as Stable Diffusion's; frames are not sharded."""

from ..attention import TemporalBasicTransformerBlock
from . import unet_3d_blocks as blocks
from . import unet_spatio_temporal_condition as upstream
from .unet_2d_condition_flax import plan_of_maps


BLOCKS = (
    blocks.CrossAttnDownBlockSpatioTemporal,
    blocks.CrossAttnUpBlockSpatioTemporal,
    blocks.DownBlockSpatioTemporal,
    blocks.UNetMidBlockSpatioTemporal,
    blocks.UpBlockSpatioTemporal,
)
PLAN = plan_of_maps(
    upstream.UNetSpatioTemporalConditionModel,
    upstream.UNetSpatioTemporalConditionOutput,
    ("sample",),
    BLOCKS,
    of_frames=(TemporalBasicTransformerBlock,),
)
