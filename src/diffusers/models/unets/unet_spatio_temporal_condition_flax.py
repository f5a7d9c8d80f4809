"""Stable Video Diffusion's UNet on TPU: sharded over the width of the maps, as Stable Diffusion's; frames are not sharded."""

from ..attention import TemporalBasicTransformerBlock
from .unet_2d_condition_flax import plan_of_maps
from .unet_3d_blocks import (
    CrossAttnDownBlockSpatioTemporal,
    CrossAttnUpBlockSpatioTemporal,
    DownBlockSpatioTemporal,
    UNetMidBlockSpatioTemporal,
    UpBlockSpatioTemporal,
)
from .unet_spatio_temporal_condition import (
    UNetSpatioTemporalConditionModel,
    UNetSpatioTemporalConditionOutput,
)


BLOCKS = (
    CrossAttnDownBlockSpatioTemporal,
    CrossAttnUpBlockSpatioTemporal,
    DownBlockSpatioTemporal,
    UNetMidBlockSpatioTemporal,
    UpBlockSpatioTemporal,
)
PLAN = plan_of_maps(
    UNetSpatioTemporalConditionModel,
    UNetSpatioTemporalConditionOutput,
    ("sample",),
    BLOCKS,
    of_frames=(TemporalBasicTransformerBlock,),
)
