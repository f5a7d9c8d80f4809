"""Tiny VAEs of every family, and how one is run: a family is a row."""

import copy
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch

import diffusers
import tiny
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.config import TPUConfig
from diffusers.tpu.pipelines.plans import flax_class, module_plan


# By name: upstream's class, sizes, pixels to a latent, frames to one: none for images.
FAMILIES = json.loads(Path(__file__).with_suffix(".json").read_text())


def new(family: str, **config) -> torch.nn.Module:
    """Upstream's with random weights."""
    name, sizes, *_ = FAMILIES[family]
    torch.manual_seed(int(np.random.default_rng().integers(1 << 31)))
    vae = tiny.with_uneven_norms(getattr(diffusers, name)(**{**sizes, **config}).eval())
    for parameter in vae.parameters():
        if not parameter.any():  # how much noise LTX's decoder draws
            torch.nn.init.uniform_(parameter)
    return vae


def draw(family: str, batch: int, frames: int, height: int, width: int, pixels=(0, 0)) -> tuple:
    """(latents of so many frames, a video of them and of some more pixels)."""
    _, _, ratio, time = FAMILIES[family]
    of_latents, of_video = ([-(-frames // time)], [frames]) if time else ([], [])
    size = height * ratio + pixels[0], width * ratio + pixels[1]
    return torch.randn(batch, 4, *of_latents, height, width) + 1, torch.randn(batch, 3, *of_video, *size) + 1


def attached(vae, chips, degrees) -> CompiledModule:
    runner = CompiledModule(vae, module_plan(vae), make_mesh(chips[: int(np.prod(degrees))], degrees), TPUConfig())
    runner.attach()
    return runner


def both(family: str, chips, degrees, dtype=torch.float32, **config) -> tuple:
    """(upstream's, the same on the mesh, its compiled module)."""
    theirs = new(family, **config).to(dtype)
    ours = copy.deepcopy(theirs)
    return theirs, ours, attached(ours, chips, degrees)


@torch.no_grad()
def decoded(vae, latents):
    torch.manual_seed(0)
    timesteps = (torch.linspace(0.05, 0.6, len(latents)),) if vae.config.get("timestep_conditioning") else ()
    return vae.decode(latents, *timesteps).sample


@torch.no_grad()
def encoded(vae, video):
    return vae.encode(video).latent_dist.parameters


# In plain JAX


def last(x: torch.Tensor) -> np.ndarray:
    """Channels last."""
    return x.float().movedim(1, -1).numpy()


def both_nnx(family: str, mesh, dtype=torch.float32, **config) -> tuple:
    """(upstream's, ours in Flax NNX of its weights)."""
    theirs = new(family, **config).to(dtype)
    if family == "hunyuanvideo1.5":
        theirs.enable_slicing()  # upstream's attention takes one video
    kind = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16}[dtype]
    return theirs, flax_class(FAMILIES[family][0]).from_torch(theirs, mesh=mesh, dtype=kind)
