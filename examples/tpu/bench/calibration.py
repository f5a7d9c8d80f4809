"""Measurements of others on hardware, as configurations that we can compile: the error of our computed seconds.

Rows are measurements whose mesh, sharding, kernel and blocks are public, all from the repository yangwhale/gpu-tpu-pedia. Scripts that
pin only the batch and the heads of q, k, v, and whose profile shows all-to-all, are compiled with the sequence split (sp); the one that
names a tensor axis for its activations, with tp. AI-Hypercomputer/maxdiffusion is left out: its transformer is another program.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from unittest import mock

from .cases import VIDEO_720P


@dataclass(frozen=True)
class Published:
    """One measurement, of a step, or of a kernel call where `attention` is (batch, heads, queries, keys, head size)."""

    name: str
    topology: str
    seconds: float
    source: str
    model: str = ""
    arguments: dict = field(default_factory=dict)
    mesh: tuple[int, int, int] | None = None
    config: dict = field(default_factory=dict)
    attention: tuple[int, ...] | None = None

    @property
    def row(self) -> dict:
        """Returns the row's identity, by which filters select."""
        return {"name": self.name, "topology": self.topology, "model": self.model or "attention"}


@contextlib.contextmanager
def as_theirs():
    """Compiles as the measured scripts do: padded keys unmasked, "online" a kernel like theirs, CogVideoX with upstream's blocks.

    Programs compiled in this context are not for running.
    """
    from diffusers.tpu.kernels.attention import api, splash  # imports JAX, which listing the rows does not need
    from diffusers.tpu.pipelines import plans

    from . import exp2

    planned = plans.model_plan

    def without_cogvideox(cls):
        return None if cls.__name__ == "CogVideoXTransformer3DModel" else planned(cls)

    def theirs(settings):
        options = {"blocks": settings.blocks, "interpret": settings.interpreted}
        return functools.partial(exp2.exp2_attention, **options), exp2.unsupported

    with (
        mock.patch.object(splash, "_segments", lambda valid, q_len: None),
        mock.patch.dict(api.KERNELS, online=theirs),
        mock.patch.object(plans, "model_plan", without_cogvideox),
    ):
        yield


COG = {"height": 640, "width": 1280, "num_frames": 61, "guidance_scale": 1.0}
EXP2 = {"attention": "online", "attention_blocks": [3328, 2816, 256]}
SPLASH = {**EXP2, "attention": "splash"}
SPLASH_3024 = {"attention": "splash", "attention_blocks": [3024, 2048, 1024]}
SPLASH_2048 = {"attention": "splash", "attention_blocks": [2048, 1024, 512]}
WAN, COGVIDEOX = "wan2.1-t2v-14b", "cogvideox1.5-5b"
GUIDE = "gpu-tpu-pedia, Wan on TPU guide: profiler, "
PAGE = "gpu-tpu-pedia, CogVideoX README (640x1280, 61 frames, no guidance)"
STEPS = "gpu-tpu-pedia, Wan 2.1 optimisation guide (3 steps, progress bar)"
WHOLE = "gpu-tpu-pedia, Wan2.1 README (229.29 s / 50, text and VAE included)"
SHARE = f"{GUIDE}40 calls of 43.93 ms are 66.8 % of a step"

PUBLISHED = (
    Published(
        "splash kernel, 5 heads of Wan 720p", "v6e-1", 0.04393, f"{GUIDE}43.93 ms a call", config=SPLASH_3024,
        attention=(1, 5, 75600, 75776, 128),
    ),
    Published("Wan 2.1 14B, stock splash", "v6e-8", 6.26, STEPS, WAN, VIDEO_720P, (2, 1, 4), SPLASH),
    Published("Wan 2.1 14B, exp2 kernel", "v6e-8", 5.35, STEPS, WAN, VIDEO_720P, (2, 1, 4), EXP2),
    Published("Wan 2.1 14B, exp2 kernel, 50 steps", "v6e-8", 4.59, WHOLE, WAN, VIDEO_720P, (2, 4, 1), EXP2),
    Published("Wan 2.1 14B, stock splash", "v6e-16", 2.63, SHARE, WAN, VIDEO_720P, (2, 8, 1), SPLASH_3024),
    Published("CogVideoX1.5 5B, stock splash", "v6e-1", 3.38, PAGE, COGVIDEOX, COG, (1, 1, 1), SPLASH_2048),
    Published("CogVideoX1.5 5B, exp2 kernel", "v6e-1", 2.73, PAGE, COGVIDEOX, COG, (1, 1, 1), EXP2),
)  # fmt: skip
