"""LTX-Video's pipelines and transformer. Oracle: upstream's, same weights, in the same process."""

import numpy as np
import PIL.Image
import pytest
import torch

import tiny
import tiny_videos
from conftest import relative
from diffusers import LTXImageToVideoPipeline, tpu
from diffusers.tpu.config import TPUConfig


def pipeline(kind: str):
    """(pipeline, further arguments)."""
    image = PIL.Image.effect_noise((96, 64), 60).convert("RGB")
    if kind == "image":
        return tiny_videos.ltx(LTXImageToVideoPipeline), {"image": image}
    if kind == "condition":  # says where each token is
        return tiny_videos.ltx_095(), {"image": image}
    return tiny_videos.ltx(), {}


@pytest.mark.parametrize(
    "kind, mesh, changes",
    [
        ("text", (1, 2, 2), {"prompt": ["a red circle", "a circle moving left"]}),
        ("image", (2, 4, 1), {}),
        ("condition", (2, 2, 1), {"decode_timestep": 0.05}),
    ],
    ids=["text", "image", "condition"],
)
def test_video_equals_upstreams(chips, kind, mesh, changes):
    pipe, further = pipeline(kind)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            tiny.with_uneven_norms(module)
    pipe.set_progress_bar_config(disable=True)
    given = {"prompt": "a red circle", "height": 64, "width": 96, "num_frames": 9, "max_sequence_length": 16}
    given |= {"num_inference_steps": 3, "output_type": "np", "guidance_scale": 3.0} | further | changes

    def frames():
        return np.asarray(pipe(**given, generator=torch.Generator().manual_seed(3)).frames)

    expected = frames()
    tpu.install(pipe, TPUConfig(mesh=mesh))
    found = frames()
    assert relative(found, expected) < 1e-5 and expected.std() > 0.01
    report = tpu.report(pipe)
    assert report["glue"] == "resident" and not report["on_host"]
    assert not any(part["eager"] for part in report["components"].values())
