"""A pipeline's whole video on simulated chips. Oracle: upstream's own, same weights and noise, in the same process."""

import numpy as np
import torch

import tiny
from conftest import relative
from diffusers import tpu
from diffusers.tpu.config import TPUConfig


def assert_video_is_upstreams(pipe, given: dict, mesh: tuple[int, int, int]):
    """What the call gives on the chips of this mesh is upstream's: every model compiled, the loop's tensors on the device."""
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            tiny.with_uneven_norms(module)
    pipe.set_progress_bar_config(disable=True)

    def frames():
        return np.asarray(pipe(**given, generator=torch.Generator().manual_seed(3)).frames)

    expected = frames()
    tpu.install(pipe, TPUConfig(mesh=mesh))
    found = frames()
    assert relative(found, expected) < 1e-5 and expected.std() > 0.01
    report = tpu.report(pipe)
    assert report["glue"] == "resident" and not report["on_host"]
    assert not any(part["eager"] for part in report["components"].values())
