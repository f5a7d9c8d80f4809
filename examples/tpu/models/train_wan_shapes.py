"""Trains wan-shapes from nothing on two cores: the autoencoder, then the text encoder and the denoiser together.

Autoencoder: `mean |e| + 2 mean e^2 + v mean |grad e| + w KL(q(z | x), N(0, 1))` with `e = x' - x`, on crops first and
whole clips last; `v` rises to 1.
Denoiser: rectified flow as Wan's, `x_s = (1 - s) x_0 + s e`, target `e - x_0`, timestep `1000 s`.

A stage's length is minutes of processor time per thread, which on idle cores is wall-clock time. Checkpoints are in `OUTPUT.train`; a run
that was stopped resumes from the last one.
"""

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import wan_shapes_parts as parts
from diffusers import AutoencoderKLWan, WanPipeline
from wan_shapes_clips import draw_dataset, make_caption
from wan_shapes_stage import Stage, load_checkpoint, save_checkpoint


VAE_CLIPS = 2048
KL_WEIGHT = 3e-5
CROPS, WHOLE, CROPS_UNTIL, ENCODER_UNTIL = (8, 5, 32), (4, 9, 64), 0.5, 0.75
DENOISER_CLIPS = 72 * 64
BATCH = 32
SHIFT = 2.0
PADDING_STEPS = 1500


def make_batch(clips: np.ndarray, rng: np.random.Generator, count: int, frames: int, crop: int) -> torch.Tensor:
    """Returns `count` random crops `B C frames crop crop` in [-1, 1] of `clips` `N F H W 3` uint8."""
    batch = []
    for index in rng.integers(len(clips), size=count):
        first = rng.integers(clips.shape[1] - frames + 1)
        top, left = rng.integers(clips.shape[2] - crop + 1, size=2)
        batch.append(clips[index, first : first + frames, top : top + crop, left : left + crop])
    return make_pixels(np.stack(batch))


def make_pixels(clips: np.ndarray) -> torch.Tensor:
    """Returns `clips` `B F H W 3` uint8 as the autoencoder takes them: `B C F H W` in [-1, 1]."""
    pixels = torch.from_numpy(clips).permute(0, 4, 1, 2, 3)
    return (pixels.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last_3d)


def vae_loss(vae: AutoencoderKLWan, pixels: torch.Tensor, edge_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the training loss and the mean absolute error of a batch `B C F H W`.

    The squared error matters at the start, as the absolute error alone converges to the background; later it is small
    beside the other terms.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.set_grad_enabled(vae.quant_conv.weight.requires_grad):
            posterior = vae.encode(pixels).latent_dist
            latents = posterior.sample()
        decoded = vae.decode(latents).sample
    error = decoded.float() - pixels
    kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    loss = error.abs().mean() + 2 * error.square().mean() + edge_weight * edges + KL_WEIGHT * kl
    return loss, error.abs().mean()


def train_vae(work: Path, minutes: float, seed: int) -> None:
    """Trains the autoencoder.

    It starts on short crops, where a step takes a quarter of the time. At the end the encoder is frozen and the decoder trained alone.
    """
    torch.manual_seed(seed)
    vae = parts.make_vae()
    stage = Stage("vae", torch.nn.ModuleDict({"vae": vae}), work, minutes, rate=0.02, decay=0.995)
    clips, _ = draw_dataset(VAE_CLIPS, seed)
    bar = tqdm(stage.steps(), initial=stage.step, desc="vae", unit="step")
    for step in bar:
        torch.manual_seed(seed + step)
        if stage.progress >= ENCODER_UNTIL and vae.quant_conv.weight.requires_grad:
            stage.freeze("vae.encoder", "vae.quant_conv")
        count, frames, crop = CROPS if stage.progress < CROPS_UNTIL else WHOLE
        pixels = make_batch(clips, np.random.default_rng((seed, step)), count, frames, crop)
        loss, error = vae_loss(vae, pixels, edge_weight=min(1.0, 4 * stage.progress))
        stage.update(loss)
        bar.set_postfix(loss=f"{loss.item():.4f}", error=f"{error.item():.4f}", used=f"{stage.progress:.0%}")


def encode_clips(vae: AutoencoderKLWan, clips: np.ndarray, work: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the clips' posterior means and deviations `N C F H W`, from disk if they are of this encoder."""
    checkpoint = work / "latents.pt"
    state = load_checkpoint(checkpoint)
    if state is None or not torch.equal(state["encoder"], vae.quant_conv.weight):
        means, deviations = [], []
        for start in tqdm(range(0, len(clips), 32), desc="latents", unit="batch"):
            with torch.no_grad():
                posterior = vae.encode(make_pixels(clips[start : start + 32])).latent_dist
            means.append(posterior.mean.contiguous())
            deviations.append(posterior.std.contiguous())
        state = {
            "means": torch.cat(means),
            "deviations": torch.cat(deviations),
            "encoder": vae.quant_conv.weight.detach().contiguous(),
        }
        save_checkpoint(checkpoint, state)
    return state["means"], state["deviations"]


def measure_channels(means: torch.Tensor, deviations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each latent channel's mean and deviation `C` over posteriors `N C F H W`."""
    axes = (0, 2, 3, 4)
    return means.mean(axes), (means.var(axes) + deviations.square().mean(axes)).sqrt()


def sample_sigmas(count: int) -> torch.Tensor:
    """Returns noise levels `B` in (0, 1]: uniform, then shifted towards noise as the scheduler shifts its own."""
    uniform = 1 - torch.rand(count)
    return SHIFT * uniform / (1 + (SHIFT - 1) * uniform)


def denoiser_loss(modules: torch.nn.ModuleDict, tokenizer, latents: torch.Tensor, captions: list[str]) -> torch.Tensor:
    """Returns the rectified-flow loss of a batch of normalised latents `B C F H W`."""
    sigmas = sample_sigmas(len(latents))
    noise = torch.randn_like(latents)
    share = sigmas.view(-1, 1, 1, 1, 1)
    embeddings = parts.embed_captions(tokenizer, modules["text_encoder"], captions)
    velocity = modules["transformer"](
        (1 - share) * latents + share * noise, (1000 * sigmas).floor(), embeddings, return_dict=False
    )[0]
    return (velocity - (noise - latents)).square().mean()


def make_denoiser(vocab_size: int) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict(
        {"text_encoder": parts.make_text_encoder(vocab_size), "transformer": parts.make_transformer()}
    )


def train_denoiser(work: Path, minutes: float, seed: int) -> None:
    """Trains text encoder and denoiser on the finished autoencoder's latents."""
    clips, subjects = draw_dataset(DENOISER_CLIPS, seed + 1)
    means, deviations = encode_clips(load_vae(work), clips, work)
    mean, std = (value.view(1, -1, 1, 1, 1) for value in measure_channels(means, deviations))
    means, deviations = (means - mean) / std, deviations / std
    torch.manual_seed(seed)
    tokenizer = parts.make_tokenizer()
    modules = make_denoiser(len(tokenizer)).train()
    padding = parts.fold_padding(modules["transformer"])
    stage = Stage("denoiser", modules, work, minutes, rate=0.02, decay=0.998)
    bar = tqdm(stage.steps(), initial=stage.step, desc="denoiser", unit="step")
    for step in bar:
        torch.manual_seed(seed + step)
        rng = np.random.default_rng((seed, step))
        padding.share = min(1.0, step / PADDING_STEPS)
        picks = rng.integers(len(means), size=BATCH)
        latents = means[picks] + deviations[picks] * torch.randn_like(means[picks])
        captions = ["" if rng.random() < 0.1 else make_caption(subjects[index], rng) for index in picks]
        loss = denoiser_loss(modules, tokenizer, latents, captions)
        stage.update(loss)
        bar.set_postfix(loss=f"{loss.item():.4f}", used=f"{stage.progress:.0%}")


def load_average(work: Path, name: str, modules: torch.nn.ModuleDict) -> torch.nn.ModuleDict:
    """Returns `modules` with the averaged weights of the stage `name`.

    Raises:
        FileNotFoundError: the stage has no checkpoint.
    """
    state = load_checkpoint(work / f"{name}.pt")
    if state is None:
        raise FileNotFoundError(f"expected {work / name}.pt, found none; run `--stage {name}` first")
    modules.load_state_dict(state["average"])
    return modules.eval()


def round_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Casts every weight to bfloat16 for storage; loading casts to the requested dtype."""
    return torch.nn.Module.to(module, torch.bfloat16)


def load_vae(work: Path) -> AutoencoderKLWan:
    """Returns the trained autoencoder with weights as they will be stored: rounded to bfloat16."""
    vae = load_average(work, "vae", torch.nn.ModuleDict({"vae": parts.make_vae()}))["vae"]
    return round_weights(vae).float()


def export(output: Path, work: Path, seed: int) -> None:
    """Writes the averaged weights to `output` as a pipeline: bfloat16, the text encoder float32 since it is small.

    The latents' mean and deviation are stored in the autoencoder's configuration, from which the pipeline reads them. The
    directory is written under another name and renamed, so that it is never incomplete; an existing model card is kept.
    """
    vae = load_vae(work)
    mean, std = measure_channels(*encode_clips(vae, draw_dataset(DENOISER_CLIPS, seed + 1)[0], work))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    tokenizer = parts.make_tokenizer()
    modules = load_average(work, "denoiser", make_denoiser(len(tokenizer)))
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.to(memory_format=torch.contiguous_format)
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=modules["text_encoder"],
        vae=round_weights(vae),
        scheduler=parts.make_scheduler(),
        transformer=round_weights(modules["transformer"]),
    )
    fresh, stale = output.with_name(output.name + ".new"), output.with_name(output.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    if output.exists():
        if (output / "README.md").exists():
            shutil.copy2(output / "README.md", fresh)
        os.replace(output, stale)
    os.replace(fresh, output)
    shutil.rmtree(stale, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains wan-shapes from nothing, or goes on where it was stopped.")
    parser.add_argument("--output", type=Path, required=True, help="model directory to write")
    parser.add_argument("--work", type=Path, help="directory of checkpoints (default: OUTPUT.train)")
    parser.add_argument("--stage", choices=("vae", "denoiser", "export", "all"), default="all")
    parser.add_argument("--minutes-vae", type=float, default=22.5)
    parser.add_argument("--minutes-denoiser", type=float, default=37)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = arguments.work or arguments.output.with_name(arguments.output.name + ".train")
    if arguments.stage in ("vae", "all"):
        train_vae(work, arguments.minutes_vae, arguments.seed)
    if arguments.stage in ("denoiser", "all"):
        train_denoiser(work, arguments.minutes_denoiser, arguments.seed)
    if arguments.stage in ("denoiser", "export", "all"):
        export(arguments.output, work, arguments.seed)


if __name__ == "__main__":
    main()
