"""Tiny denoisers of every family, and the inputs of one call: maps that no axis of the tests' meshes divides.

`denoisers.json` says each one's class and sizes, or its name in `tiny.json`, and its inputs as expressions of torch's functions and those
of this file; an entry that is `like` another says what differs.
"""

import importlib
import inspect

import torch

import tiny
from conftest import table
from diffusers.models.embeddings import get_3d_rotary_pos_embed as rotary  # noqa: F401  in expressions


TABLE = table("denoisers")
WORDS, WIDTH = 11, tiny.WIDTH


def entry(kind: str) -> dict:
    made = dict(TABLE[kind])
    base = entry(made.pop("like")) if "like" in made else {"inputs": {}}
    return {**base, **made, "inputs": base["inputs"] | made.get("inputs", {})}


def built(kind: str, heads: int = 4) -> torch.nn.Module:
    if (name := entry(kind)["_"]).startswith("@"):
        return tiny.part(name[1:])
    sizes, usual = entry(kind), {"num_attention_heads": heads, "attention_head_dim": 16, "num_layers": 3}
    module, _, name = f"diffusers.{sizes.pop('_')}".rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    named = inspect.signature(cls).parameters
    sizes = {name: size for name, size in usual.items() if name in named} | sizes
    if kind == "sd3.5":
        sizes["caption_projection_dim"] = 16 * heads
    del sizes["inputs"]
    return tiny.with_uneven_norms(cls(**sizes).eval())


def inputs(kind: str, batch: int = 1, images: int = 2) -> dict:
    """Arguments of a call. `images`: so many one behind the other, as Kontext's."""
    names = {**vars(torch), **globals(), "batch": batch, "images": images}
    return {name: eval(text, names) for name, text in entry(kind)["inputs"].items()} | {"return_dict": False}


def ids(*sizes: int) -> torch.Tensor:
    """Places in a grid of these sizes, one after another [T, axes]."""
    return torch.cartesian_prod(*map(torch.arange, sizes)).float()


def seen(batch: int) -> torch.Tensor:
    """A mask of texts of different lengths."""
    return (torch.arange(WORDS) < torch.randint(1, WORDS, (batch, 1))).long()
