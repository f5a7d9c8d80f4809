"""The UNet of Stable Diffusion and SDXL on TPU: upstream's module, split over the width of the maps.

A batch that `dp` divides lies over it. Convolutions get their neighbours' columns, group norms have the statistics of the whole map,
self-attention sees the keys of all chips; text is whole on each. What is not known to compute on a shard is left to the compiler.
"""

import inspect

import torch

from ...tpu.chips.sharding import ModelPlan
from ..attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from .unet_2d_blocks import (
    CrossAttnDownBlock2D,
    CrossAttnUpBlock2D,
    DownBlock2D,
    UNetMidBlock2D,
    UNetMidBlock2DCrossAttn,
    UpBlock2D,
)
from .unet_2d_condition import UNet2DConditionModel


BLOCKS = {CrossAttnDownBlock2D, CrossAttnUpBlock2D, DownBlock2D, UNetMidBlock2D, UNetMidBlock2DCrossAttn, UpBlock2D}
RESIDUALS = (
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
)
FREE_U = ("s1", "s2", "b1", "b2")


def attention(attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
    """As upstream's; text's keys are the same on each shard."""
    from ...tpu.compile.tracing import keys_of_text

    with keys_of_text(encoder_hidden_states is not None):
        return type(attn).forward(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


def by_shards(model, maps: tuple[str, ...], *args, **kwargs):
    """`forward` of a model of maps, one shard of their width a chip. `maps`: names of the arguments that are maps, in any structure.

    Raises NotByShards for a model, or a call, that is not known to compute on a shard what it computes on the map.
    """
    from ...tpu.compile.tracing import NotByShards, shard_maps

    given = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
    given = {name: value for name, value in given.items() if name != "self"}
    sample, multiple = given["sample"], 2 ** (len(model.config.block_out_channels) - 1)
    if any(size % multiple for size in sample.shape[-2:]):
        raise NotByShards(f"expected a map whose sides {multiple} divides, got {list(sample.shape[-2:])}")
    return_dict = given.pop("return_dict", True)

    def forward(given):
        return type(model).forward(model, **given, return_dict=False)

    found = shard_maps(forward, given, maps, sample, multiple)
    return found, return_dict


def check(model, blocks):
    """Raises NotByShards for a model that has parts whose computation on a shard is not known."""
    from ...tpu.compile.tracing import NotByShards

    config, processors = model.config, {type(m.processor) for m in model.modules() if isinstance(m, Attention)}
    unknown = {type(block) for block in blocks if block is not None} - BLOCKS | (processors - {AttnProcessor2_0})
    unknown = sorted(cls.__name__ for cls in unknown)
    unknown += ["FreeU"] * any(getattr(block, name, None) is not None for block in blocks for name in FREE_U)
    for name, known in (
        ("attention_type", "default"),
        ("resnet_time_scale_shift", "default"),
        ("center_input_sample", False),
    ):
        unknown += [name] * (getattr(config, name, known) != known)
    unknown += ["addition_embed_type"] * (getattr(config, "addition_embed_type", None) == "image_hint")
    if unknown:
        raise NotByShards(f"expected parts that compute on a shard of the maps, got {', '.join(unknown)}")


def _forward(unet, *args, **kwargs):
    from .unet_2d_condition import UNet2DConditionOutput

    check(unet, (*unet.down_blocks, unet.mid_block, *unet.up_blocks))
    (sample,), return_dict = by_shards(unet, ("sample", *RESIDUALS), *args, **kwargs)
    return UNet2DConditionOutput(sample=sample) if return_dict else (sample,)


def plan(cls: type[torch.nn.Module], forward) -> ModelPlan:
    """The plan of a class of such blocks, whose forward is `forward`."""
    processors = {AttnProcessor: lambda processor: AttnProcessor2_0()}  # the same attention
    methods = {(cls, "forward"): forward, (Attention, "forward"): attention}
    return ModelPlan(parallel=True, methods=methods, processors=processors, axes=4)


PLAN = plan(UNet2DConditionModel, _forward)
