"""Trains a LoRA of a Wan text-to-video model on a folder of short clips NAME.mp4, each with its prompt in NAME.txt.

The adapter is written as a file for `pipe.load_lora_weights`. A run that was stopped resumes from its last checkpoint.
"""

import argparse
import os
from pathlib import Path

import imageio.v3
import numpy as np
import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from tqdm.auto import tqdm

from diffusers import WanPipeline
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from diffusers.utils import export_to_video


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
parser.add_argument("--data", type=Path, required=True, help="folder of NAME.mp4 and NAME.txt; all clips of one size")
parser.add_argument("--output", type=Path, default=Path("wan-lora"))
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=1e-4)
parser.add_argument("--flow-shift", type=float, default=3.0)
parser.add_argument("--checkpoint-every", type=int, default=250, help="steps")
parser.add_argument("--validation-prompt", help="a video of it is written at the end")
parser.add_argument("--validation-guidance", type=float, default=5.0)
parser.add_argument("--validation-steps", type=int, default=50)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cuda")
args = parser.parse_args()
torch.manual_seed(args.seed)

pipe = WanPipeline.from_pretrained(args.model, torch_dtype=getattr(torch, args.dtype)).to(args.device)
pipe.set_progress_bar_config(disable=True)
transformer, vae = pipe.transformer.requires_grad_(False), pipe.vae.requires_grad_(False)


def encoded(clip: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the clip's normalised latents [C, F, H, W] and its prompt's embeddings."""
    frames = torch.from_numpy(np.asarray(imageio.v3.imread(clip))).permute(3, 0, 1, 2)[None] / 127.5 - 1
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    latents = vae.encode(frames.to(args.device, vae.dtype)).latent_dist.mode().cpu().float()
    text, _ = pipe.encode_prompt(clip.with_suffix(".txt").read_text().strip(), do_classifier_free_guidance=False)
    return ((latents - mean) / std)[0], text[0].cpu()


clips = sorted(args.data.glob("*.mp4"))
if not clips:
    raise SystemExit(f"expected clips NAME.mp4 in {args.data}, found none")
with torch.no_grad():
    data = [encoded(clip) for clip in tqdm(clips, desc="clips")]

targets = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
transformer.add_adapter(LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=targets))
cast_training_params(transformer)  # adapters are float32
transformer.train()
transformer.enable_gradient_checkpointing()
adapters = [p for p in transformer.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=args.learning_rate)
schedule = get_scheduler("cosine", optimizer, num_warmup_steps=args.steps // 20, num_training_steps=args.steps)

args.output.mkdir(parents=True, exist_ok=True)
checkpoint, first = args.output / "checkpoint.pt", 0
if checkpoint.exists():
    state = torch.load(checkpoint, weights_only=True)
    set_peft_model_state_dict(transformer, state["adapter"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    first = state["step"]

bar = tqdm(range(first, args.steps), initial=first, total=args.steps, desc="steps")
for step in bar:
    generator = torch.Generator().manual_seed(args.seed + step)  # of the step: a run that was stopped draws the same
    picks = torch.randint(len(data), (args.batch_size,), generator=generator)
    latents, text = (torch.stack(some) for some in zip(*(data[n] for n in picks)))
    noise = torch.randn(latents.shape, generator=generator)
    uniform = 1 - torch.rand(args.batch_size, generator=generator)
    sigma = args.flow_shift * uniform / (1 + (args.flow_shift - 1) * uniform)
    share = sigma.view(-1, 1, 1, 1, 1)
    noisy = ((1 - share) * latents + share * noise).to(args.device, transformer.dtype)
    velocity = transformer(noisy, (1000 * sigma).to(args.device), text.to(args.device), return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(velocity.float(), (noise - latents).to(args.device))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(adapters, 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    bar.set_postfix(loss=f"{loss.item():.4f}")
    if (step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps:
        state = {"adapter": get_peft_model_state_dict(transformer), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "step": step + 1}
        torch.save(state, checkpoint.with_suffix(".new"))
        os.replace(checkpoint.with_suffix(".new"), checkpoint)

pipe.save_lora_weights(args.output, transformer_lora_layers=get_peft_model_state_dict(transformer))
if args.validation_prompt:
    transformer.eval()
    channels, frames, height, width = data[0][0].shape
    video = pipe(
        args.validation_prompt,
        height=height * pipe.vae_scale_factor_spatial,
        width=width * pipe.vae_scale_factor_spatial,
        num_frames=(frames - 1) * pipe.vae_scale_factor_temporal + 1,
        num_inference_steps=args.validation_steps,
        guidance_scale=args.validation_guidance,
        generator=torch.Generator().manual_seed(args.seed),
    ).frames[0]
    export_to_video(video, args.output / "validation.mp4", fps=16)
