"""Which calls of a denoiser have sparse attention (`TPUConfig.attention_sparsity`), and the sizes of their video."""

import contextlib
from collections.abc import Iterator

import torch

from .. import bridge
from ..common.config import TPUConfig
from ..common.notices import warn_once
from ..kernels.attention.api import explain
from .call import Call, values_of


def thin_out(call: Call, config: TPUConfig, module: torch.nn.Module):
    """Give the call sparse attention, if its timestep is one that the configuration selects.

    Raises NotImplementedError for a model whose latents are no video.
    """
    if call.latents is None or call.latents.ndim != 5:
        got = "no latents" if call.latents is None else f"latents of shape {list(call.latents.shape)}"
        raise NotImplementedError(
            "expected a denoiser of videos, with latents [B, C, F, H, W] or [B, F, C, H, W], for TPUConfig(attention_sparsity="
            f"{config.attention_sparsity}), got {type(module).__name__} with {got}; leave it out"
        )
    if _timestep(call) <= config.attention_sparse_below:
        sizes, channels = call.latents.shape[1:], getattr(getattr(module, "config", None), "in_channels", None)
        frames = sizes[0] if sizes[1] == channels else sizes[1]
        call.become_sparse((frames, *sizes[2:]), config.attention_sparsity)


@contextlib.contextmanager
def looked_for(call: Call, name: str) -> Iterator[None]:
    """Around a trace of the call, for the model of this name: warn if it has no self-attention of a video's tokens."""
    looks = call.sparse and call.step.kind is None  # a cache's step may skip all attention
    before = explain() if looks else {}
    yield
    if looks and not any("nearest" in way.mask and times > before.get(way, 0) for way, times in explain().items()):
        sizes, sparsity = call.sparse
        warn_once(
            f"attention_sparsity={sparsity} changes nothing in {name}: none of its attentions is of a video's tokens among themselves,"
            f" one a patch of latents {sizes}"
        )


def _timestep(call: Call) -> float:
    """The call's largest, as each token may have its own. It waits for the device if the host does not have the value."""
    if not isinstance(call.timestep, torch.Tensor):
        return float(call.timestep)
    known = bridge.known_values(call.timestep) if bridge.on_device(call.timestep) else None
    return float((values_of(call.timestep) if known is None else known).max())
