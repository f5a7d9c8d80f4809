"""The parts of wan-shapes before training: real diffusers and transformers classes, made small, from random weights.

Letters: B batch, S key tokens, C channels, F frames, H height, W width.
"""

import math

import torch
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResidualBlock
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from wan_shapes_clips import COLOURS, DIRECTIONS, PHRASES, SHAPES


MAX_SEQUENCE_LENGTH = 512
TEXT_DIM = 64
Z_DIM = 16


def make_vae() -> AutoencoderKLWan:
    """Returns the autoencoder: Wan 2.1's plan (8 x 8 x 4, 16 latent channels) with 12 base channels.

    It starts almost linear: convolutions keep the variance of what goes in, residual branches add nothing, and a
    posterior has a mean of variance about one and a deviation of `exp(-3)`. From the classes' own initial weights
    training finds only the mean picture, since the signal drowns in the posterior's noise.
    """
    vae = AutoencoderKLWan(
        base_dim=12,
        z_dim=Z_DIM,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * Z_DIM,
        latents_std=[1.0] * Z_DIM,
    )
    for module in vae.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            torch.nn.init.zeros_(module.bias)
        if isinstance(module, torch.nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)
    for module in vae.modules():
        if isinstance(module, WanResidualBlock):
            torch.nn.init.zeros_(module.conv2.weight)
        if isinstance(module, WanAttentionBlock):
            torch.nn.init.zeros_(module.proj.weight)
    with torch.no_grad():
        vae.quant_conv.weight[:Z_DIM].mul_(5)
        vae.quant_conv.weight[Z_DIM:].zero_()
        vae.quant_conv.bias[Z_DIM:].fill_(-6)
    return vae


def make_tokenizer() -> T5TokenizerFast:
    """Returns a T5 tokenizer whose pieces are the words of the captions; any other word becomes `<unk>`."""
    filler = {word for phrase in PHRASES for word in phrase.split() if word.isalpha()}
    openers = [word.capitalize() for word in ("a", "the", *COLOURS)]
    words = [*COLOURS, *SHAPES, *DIRECTIONS, *sorted(filler), *openers]
    pieces = ["<pad>", "</s>", "<unk>", "▁", ",", ".", *(f"▁{word}" for word in words)]
    vocab = [(piece, 0.0 if piece.startswith("<") else -2.0) for piece in pieces]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=MAX_SEQUENCE_LENGTH)


def make_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocab_size,
            d_model=TEXT_DIM,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=32,
        )
    )


def make_transformer() -> WanTransformer3DModel:
    """Returns the denoiser: 4 layers, 8 heads of 24, its output zero at first.

    Zero padding is most of what cross-attention sees. Without biases in the text embedder and the key projection its
    keys and values start as zeros too, so that they do not dominate the words.
    """
    transformer = WanTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=24,
        in_channels=Z_DIM,
        out_channels=Z_DIM,
        text_dim=TEXT_DIM,
        freq_dim=128,
        ffn_dim=768,
        num_layers=4,
    )
    text_embedder = transformer.condition_embedder.text_embedder
    for bias in (text_embedder.linear_1.bias, text_embedder.linear_2.bias, *transformer.proj_out.parameters()):
        torch.nn.init.zeros_(bias)
    for block in transformer.blocks:
        torch.nn.init.zeros_(block.attn2.to_k.bias)
        torch.nn.init.zeros_(block.attn2.to_v.bias)
    return transformer


def make_scheduler() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


class FoldedPadding(WanAttnProcessor):
    """Cross-attention over one padding token that stands for many.

    The pipeline pads a prompt's embedding with zeros to `S = 512` tokens and masks none of them, so all `n` padding
    tokens have one key `k` and one value `v`:

        sum_i exp(q k_i) v_i + n exp(q k) v = sum_i exp(q k_i) v_i + exp(q k + log n) v

    The last key token carries the bias `log n`. `share` in [0, 1] scales that bias and rises to 1 in early training.
    """

    def __init__(self):
        super().__init__()
        self.share = 1.0

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        tokens = encoder_hidden_states.shape[1]
        bias = hidden_states.new_zeros(1, 1, 1, tokens)
        bias[..., -1] = self.share * math.log(MAX_SEQUENCE_LENGTH - tokens + 1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, bias, rotary_emb)


def fold_padding(transformer: WanTransformer3DModel) -> FoldedPadding:
    """Sets the training-only processor on every cross-attention of `transformer` and returns it."""
    processor = FoldedPadding()
    for block in transformer.blocks:
        block.attn2.set_processor(processor)
    return processor


def embed_captions(tokenizer: T5TokenizerFast, text_encoder: UMT5EncoderModel, captions: list[str]) -> torch.Tensor:
    """Returns embeddings `B S 64` as WanPipeline makes them, cut after the longest caption and one padding token."""
    tokens = tokenizer(captions, padding="longest", return_tensors="pt")
    hidden_states = text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    embeddings = hidden_states * tokens.attention_mask[..., None]
    return torch.nn.functional.pad(embeddings, (0, 0, 0, 1))
