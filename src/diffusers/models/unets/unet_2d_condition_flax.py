"""The UNet of Stable Diffusion and SDXL on TPU: upstream's module, sharded over the width of the maps; shared by UNets of videos.

A batch that `dp` divides is sharded over it. Convolutions get halos, group norms use statistics of the whole map, self-attention
sees all chips' keys; text is replicated. Models with parts not known to compute on a shard are left to the compiler.
"""

import functools
import inspect

from ...tpu.chips.sharding import ModelPlan
from ...tpu.compile.state.watch import replaced
from ...tpu.compile.tracing.video import shard_maps
from ...tpu.kernels.video.halo import NotByShards, keys_here
from ..attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from ..autoencoders.autoencoder_kl_flax import upsampled
from ..upsampling import Upsample2D
from .unet_2d_blocks import (
    CrossAttnDownBlock2D,
    CrossAttnUpBlock2D,
    DownBlock2D,
    UNetMidBlock2D,
    UNetMidBlock2DCrossAttn,
    UpBlock2D,
)
from .unet_2d_condition import UNet2DConditionModel, UNet2DConditionOutput


BLOCKS = (CrossAttnDownBlock2D, CrossAttnUpBlock2D, DownBlock2D, UNetMidBlock2D, UNetMidBlock2DCrossAttn, UpBlock2D)
RESIDUALS = (
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
)
FREE_U = ("s1", "s2", "b1", "b2")
KNOWN = {  # values of a configuration that read no more of a map than the blocks do
    "attention_type": ("default",),
    "resnet_time_scale_shift": ("default", "scale_shift"),
    "addition_embed_type": (None, "text", "text_time", "text_image", "image"),
    "center_input_sample": (False,),
    "global_pool_conditions": (False,),
}


class Fused(AttnProcessor2_0):
    """In place of `upstream`, an AttnProcessor, which computes scores for all to see, by a scale that a script may set."""

    def __init__(self, upstream: AttnProcessor):
        super().__init__()
        self.upstream = upstream

    def covers(self, attn) -> bool:
        """Whether the attention is PyTorch's, and nobody looks at its scores."""
        usual = attn.scale == (attn.inner_dim // attn.heads) ** -0.5 and attn.norm_q is attn.norm_k is None
        return usual and "get_attention_scores" not in vars(attn)

    def __call__(self, attn, *args, **kwargs):
        return (super().__call__ if self.covers(attn) else self.upstream)(attn, *args, **kwargs)


def _attention(attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
    """As upstream's; the keys of text are the same on each shard."""
    with keys_here(encoder_hidden_states is not None):
        return type(attn).forward(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


def _among_frames(module, *args, **kwargs):
    """As upstream's forward of a module that attends among the frames of each position."""
    with keys_here():
        return type(module).forward(module, *args, **kwargs)


def _by_shards(output: type, maps: tuple[str, ...], known: tuple, model, *args, **kwargs):
    """As upstream's forward of a model of maps [B, C, H, W] or videos, with a shard of their width per chip; see `plan_of_maps`.

    Raises NotByShards for a model, or a call, that is not known to compute on a shard what it computes on the map.
    """
    blocks = *model.down_blocks, model.mid_block, *getattr(model, "up_blocks", ())
    unknown = _unknown(model, [block for block in blocks if block is not None], {*known})
    if unknown:
        raise NotByShards(f"expected parts that compute on a shard of the maps, got {', '.join(unknown)}")
    given = inspect.signature(functools.partial(type(model).forward, model)).bind(*args, **kwargs).arguments
    multiple = 2 ** (len(model.config.block_out_channels) - 1)
    sample, by_name = given["sample"], given.pop("return_dict", True)
    if any(size % multiple for size in sample.shape[-2:]):
        raise NotByShards(f"expected a map whose sides {multiple} divides, got {list(sample.shape[-2:])}")
    text = given.get("encoder_hidden_states")
    of_frames = sample.ndim == 5 and len(text) > len(sample)  # a text for each, sharded as its video
    if of_frames:
        given["encoder_hidden_states"] = text.unflatten(0, (len(sample), -1))

    def forward(given: dict):
        if of_frames:
            given = given | {"encoder_hidden_states": given["encoder_hidden_states"].flatten(0, 1)}
        return type(model).forward(model, **given, return_dict=False)

    # A feed-forward in chunks gives the same values, but chunks of a batch or of tokens need not divide those of a shard.
    chunked = [vars(part) for part in model.modules() if getattr(part, "_chunk_size", None)]
    with replaced([(own, "_chunk_size", None) for own in chunked]):
        outputs = shard_maps(forward, given, maps, sample, multiple)
    return output(*outputs) if by_name else outputs


def _unknown(model, blocks: list, known: set) -> list[str]:
    """The model's parts and settings that are not known to compute on a shard."""
    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    processors = {type(m.processor) for m in attentions} - {AttnProcessor2_0, Fused}
    found = [cls.__name__ for cls in ({*map(type, blocks)} - known) | processors]
    found += ["scores"] * any(isinstance(m.processor, Fused) and not m.processor.covers(m) for m in attentions)
    found += ["FreeU"] * any(getattr(block, name, None) is not None for block in blocks for name in FREE_U)
    return sorted(found) + [f"{k} {v}" for k, v in model.config.items() if k in KNOWN and v not in KNOWN[k]]


def plan_of_maps(
    cls: type, output: type, maps: tuple = ("sample", *RESIDUALS), known: tuple = BLOCKS, of_frames: tuple = ()
) -> ModelPlan:
    """The plan of a class with such blocks, whose forward returns an `output`.

    Args:
        maps: names of the arguments that are maps, in any structure; known: classes of its blocks.
        of_frames: classes of modules whose attention is among the frames of each position of a video.
    """
    forward = functools.partial(_by_shards, output, maps, known)
    methods = {(cls, "forward"): forward, (Attention, "forward"): _attention, (Upsample2D, "forward"): upsampled}
    methods |= {(one, "forward"): _among_frames for one in of_frames}
    return ModelPlan(parallel=True, methods=methods, processors={AttnProcessor: Fused}, axes=5 if of_frames else 4)


PLAN = plan_of_maps(UNet2DConditionModel, UNet2DConditionOutput)
