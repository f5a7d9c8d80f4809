"""Stable Video Diffusion's UNet on TPU: split over the width of the maps, as that of Stable Diffusion; each position's frames are on one chip."""

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
