"""The model that stages 6, 7 and 9 run: a Wan of two blocks with weights drawn from a seed, as a wheel contains no model."""

import math

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

from ... import report
from .running import STAGES


WIDTH = 64  # of the text
SPATIAL, PATCH, TEMPORAL = 8, 2, 4  # pixels of a latent, latents of a token, frames of a latent
PROMPT, SEED = "a red circle moving right", 1


def make_pipeline(heads: int, dtype: torch.dtype = torch.float32) -> WanPipeline:
    """The pipeline without the TPU path, its VAE in float32 as model cards load it. `heads`: how many, of 128 channels each."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        text = UMT5Config(vocab_size=64, d_model=WIDTH, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
        sizes = {"num_attention_heads": heads, "attention_head_dim": 128, "ffn_dim": 512 * heads, "num_layers": 2}
        transformer = WanTransformer3DModel(**sizes, text_dim=WIDTH, rope_max_seq_len=256)
        sizes = {"base_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
        vae = AutoencoderKLWan(**sizes, temperal_downsample=[False, True, True])
        encoder = UMT5EncoderModel(text)
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<unk>", *PROMPT.split()])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", model_max_length=64
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(tokenizer, encoder.eval().to(dtype), vae.eval(), scheduler, transformer.eval().to(dtype))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def size_of(request: dict, chips: int) -> dict:
    """The call's arguments that determine sizes, with enough frames that each chip has `rows` tokens."""
    side = request["side"]
    frames = max(2, math.ceil(request["rows"] * chips / (side // SPATIAL // PATCH) ** 2))
    return {
        "height": side, "width": side, "num_frames": TEMPORAL * (frames - 1) + 1, "num_inference_steps": request["steps"],
        "max_sequence_length": 64,
    }  # fmt: skip


def call(pipe, size: dict, **more):
    """The video [B, F, H, W, C] of one call, in float32."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    video = pipe(PROMPT, negative_prompt="blurred", **size, generator=generator, output_type="pt", **more).frames
    return video.detach().to("cpu", torch.float32)


def compilations(pipe) -> dict[str, int]:
    """Component -> how many programs were compiled instead of loaded."""
    return {name: one["compilations"] for name, one in report(pipe)["components"].items()}


def model_request(request: dict) -> dict:
    """The settings of stage 7, for the other stages that run its model."""
    kind = "simulated" if request["simulated"] else "tpu"
    return {**STAGES["model"], **STAGES["model"][kind]}
