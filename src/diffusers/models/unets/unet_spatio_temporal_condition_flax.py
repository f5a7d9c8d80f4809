"""Stable Video Diffusion's UNet on TPU: split over the width of the maps, as that of Stable Diffusion; each position's frames are on one chip."""

from ..attention import TemporalBasicTransformerBlock
from .unet_2d_condition_flax import by_shards, plan_of_maps
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


BLOCKS = {
    *(CrossAttnDownBlockSpatioTemporal, CrossAttnUpBlockSpatioTemporal, DownBlockSpatioTemporal),
    *(UNetMidBlockSpatioTemporal, UpBlockSpatioTemporal),
}


def _forward(unet, *args, **kwargs):
    blocks = *unet.down_blocks, unet.mid_block, *unet.up_blocks
    outputs, by_name = by_shards(unet, blocks, ("sample",), *args, known=BLOCKS, **kwargs)
    return UNetSpatioTemporalConditionOutput(*outputs) if by_name else outputs


PLAN = plan_of_maps(UNetSpatioTemporalConditionModel, _forward, TemporalBasicTransformerBlock)
