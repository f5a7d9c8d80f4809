"""Tiny denoisers of every family with a plan of its own, and the inputs of one call: maps that no axis of the tests' meshes divides."""

import torch

import tiny
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed


WORDS, WIDTH = 11, tiny.WIDTH
GRID = (5, 7)


def texts(batch: int, *more: str) -> dict:
    """Embeddings of texts; a "pooled" one, and a "mask" of different lengths under its upstream name."""
    given = {"encoder_hidden_states": torch.randn(batch, WORDS, WIDTH), "return_dict": False}
    if "pooled" in more:
        given["pooled_projections"] = torch.randn(batch, WIDTH)
    for name in more:
        if name.endswith("mask"):
            given[name] = (torch.arange(WORDS) < torch.randint(1, WORDS, (batch, 1))).long()
    return given


def flux(heads):
    return FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 6, 6), guidance_embeds=True,
    )  # fmt: skip


def flux_inputs(model, batch, images=2):
    """So many images one behind the other, as Kontext's."""
    places = torch.tensor([[n, y, x] for n in range(images) for y in range(GRID[0]) for x in range(GRID[1])]).float()
    return texts(batch, "pooled") | {
        "hidden_states": torch.randn(batch, len(places), 4),
        "timestep": torch.rand(batch),
        "img_ids": places,
        "txt_ids": torch.randn(WORDS, 3),  # upstream's pipelines have zeros
        "guidance": torch.full((batch,), 3.5),
    }


def qwen(heads, **changes):
    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6), **changes,
    )  # fmt: skip


def qwen_inputs(model, batch):
    """An image beside the latents. Layered images have a condition of time; edits have no mask."""
    config = model.config
    given = texts(batch, *(() if config.zero_cond_t else ("encoder_hidden_states_mask",)))
    return {"encoder_hidden_states_mask": None} | given | {
        "hidden_states": torch.randn(batch, GRID[0] * GRID[1] + 12, 16),
        "timestep": torch.rand(batch),
        "img_shapes": [[(1, *GRID), (1, 3, 4)]] * batch,
        **({"additional_t_cond": torch.zeros(batch, dtype=torch.long)} if config.use_additional_t_cond else {}),
    }  # fmt: skip


def sd35(heads):
    return SD3Transformer2DModel(
        sample_size=14, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=WIDTH, caption_projection_dim=16 * heads, pooled_projection_dim=WIDTH, pos_embed_max_size=9,
        dual_attention_layers=(0, 1), qk_norm="rms_norm",
    )  # fmt: skip


def sd3_inputs(model, batch):
    latents = torch.randn(batch, 4, *(2 * n for n in GRID))
    return texts(batch, "pooled") | {"hidden_states": latents, "timestep": torch.rand(batch) * 1000}


def cogvideox(heads, **changes):
    frames, height, width = (2, 8, 6) if "patch_size_t" in changes else (3, 10, 6)
    return CogVideoXTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=WIDTH, num_layers=3, sample_frames=4 * frames - 3, sample_height=height, sample_width=width,
        max_text_seq_length=WORDS, **changes,
    )  # fmt: skip


def cogvideox_inputs(model, batch):
    config = model.config
    frames, height, width = (config.sample_frames + 3) // 4, config.sample_height, config.sample_width
    given = texts(batch) | {
        "hidden_states": torch.randn(batch, frames, 4, height, width),
        "timestep": torch.randint(1, 1000, (1,)).expand(batch),
    }
    if config.ofs_embed_dim:
        given["ofs"] = torch.full((1,), 2.0)
    if config.use_rotary_positional_embeddings:
        grid, frames = (height // 2, width // 2), frames // (config.patch_size_t or 1)
        given["image_rotary_emb"] = get_3d_rotary_pos_embed(config.attention_head_dim, ((0, 0), grid), grid, frames)
    return given


def hunyuan_inputs(model, batch):
    framepack = hasattr(model, "clean_x_embedder")
    frames, height, width = (3, 16, 8) if framepack else (3, 10, 6)
    given = texts(batch, "pooled", "encoder_attention_mask") | {
        "hidden_states": torch.randn(batch, model.config.in_channels, frames, height, width),
        "timestep": torch.randint(1, 1000, (batch,)),
        "guidance": torch.tensor([6000.0] * batch),
    }
    if framepack:
        given["image_embeds"], given["indices_latents"] = torch.randn(batch, 5, 16), torch.arange(frames) + 19
        for name, count in (("clean", 2), ("history_2x", 2), ("history_4x", 4)):
            given[f"latents_{name}"] = torch.randn(batch, 4, count, height, width)
            given[f"indices_latents_{name}"] = torch.arange(count)
    return given


ROTARY = {"use_rotary_positional_embeddings": True}
DENOISERS = {
    "sd3.5": (sd35, sd3_inputs),
    "flux": (flux, flux_inputs),
    "qwen": (qwen, qwen_inputs),
    "qwen edit": (lambda heads: qwen(heads, zero_cond_t=True), qwen_inputs),
    "qwen layered": (lambda heads: qwen(heads, use_layer3d_rope=True, use_additional_t_cond=True), qwen_inputs),
    "cogvideox 2b": (cogvideox, cogvideox_inputs),
    "cogvideox 5b": (lambda heads: cogvideox(heads, **ROTARY), cogvideox_inputs),
    "cogvideox 5b image": (
        lambda heads: cogvideox(heads, **ROTARY, use_learned_positional_embeddings=True), cogvideox_inputs
    ),
    "cogvideox 1.5": (lambda heads: cogvideox(heads, **ROTARY, patch_size_t=2, patch_bias=False), cogvideox_inputs),
    "cogvideox 1.5 image": (
        lambda heads: cogvideox(heads, **ROTARY, patch_size_t=2, ofs_embed_dim=8, patch_bias=False), cogvideox_inputs
    ),
    "hunyuan": (lambda heads: tiny.hunyuan_transformer(), hunyuan_inputs),
    "hunyuan image": (lambda heads: tiny.hunyuan_transformer(image_condition_type="token_replace"), hunyuan_inputs),
    "framepack": (lambda heads: tiny.framepack(), hunyuan_inputs),
}  # fmt: skip


def built(kind: str, heads: int = 4) -> torch.nn.Module:
    return tiny.with_uneven_norms(DENOISERS[kind][0](heads).eval())


def inputs(kind: str, model: torch.nn.Module, batch: int, **more) -> dict:
    return DENOISERS[kind][1](model, batch, **more)
