"""LTX-Video's pipelines and transformer. Oracle: upstream's, same weights, in the same process."""

import PIL.Image
import pytest

import tiny
from video_oracle import assert_video_is_upstreams


def pipeline(kind: str):
    """(pipeline, further arguments)."""
    image = PIL.Image.effect_noise((96, 64), 60).convert("RGB")
    if kind == "image":
        return tiny.ltx_i2v(), {"image": image}
    if kind == "condition":  # says where each token is
        return tiny.ltx_095(), {"image": image}
    return tiny.ltx(), {}


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
    given = {"prompt": "a red circle", "height": 64, "width": 96, "num_frames": 9, "max_sequence_length": 16}
    given |= {"num_inference_steps": 3, "output_type": "np", "guidance_scale": 3.0} | further | changes
    assert_video_is_upstreams(pipe, given, mesh)
