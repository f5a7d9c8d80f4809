"""Measurements of others on hardware, as configurations that we can compile: the error of our computed seconds.

Rows are measurements whose mesh, sharding, kernel and blocks are public, all from the repository yangwhale/gpu-tpu-pedia. Scripts that
pin only the batch and the heads of q, k, v, and whose profile shows all-to-all, are compiled with the sequence split (sp); the one that
names a tensor axis for its activations, with tp. AI-Hypercomputer/maxdiffusion is left out: its transformer is another program.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from unittest import mock


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


WAN = {"height": 720, "width": 1280, "num_frames": 81}
COG = {"height": 640, "width": 1280, "num_frames": 61, "guidance_scale": 1.0}
STOCK = {"attention": "splash", "attention_blocks": [3328, 2816, 256]}
EXP2 = {"attention": "online", "attention_blocks": [3328, 2816, 256]}

PUBLISHED = (
    Published(
        "splash kernel, 5 heads of Wan 720p",
        "v6e-1",
        0.04393,
        "gpu-tpu-pedia, Wan on TPU guide: profiler, 43.93 ms a call",
        attention=(1, 5, 75600, 75776, 128),
        config={"attention": "splash", "attention_blocks": [3024, 2048, 1024]},
    ),
    Published(
        "Wan 2.1 14B, stock splash",
        "v6e-8",
        6.26,
        "gpu-tpu-pedia, Wan 2.1 optimisation guide (3 steps, progress bar)",
        "wan2.1-t2v-14b",
        WAN,
        (2, 1, 4),
        STOCK,
    ),
    Published(
        "Wan 2.1 14B, exp2 kernel",
        "v6e-8",
        5.35,
        "gpu-tpu-pedia, Wan 2.1 optimisation guide (3 steps, progress bar)",
        "wan2.1-t2v-14b",
        WAN,
        (2, 1, 4),
        EXP2,
    ),
    Published(
        "Wan 2.1 14B, exp2 kernel, 50 steps",
        "v6e-8",
        4.59,
        "gpu-tpu-pedia, Wan2.1 README (229.29 s / 50, text and VAE included)",
        "wan2.1-t2v-14b",
        WAN,
        (2, 4, 1),
        EXP2,
    ),
    Published(
        "Wan 2.1 14B, stock splash",
        "v6e-16",
        2.63,
        "gpu-tpu-pedia, Wan on TPU guide: profiler, 40 calls of 43.93 ms are 66.8 % of a step",
        "wan2.1-t2v-14b",
        WAN,
        (2, 8, 1),
        {"attention": "splash", "attention_blocks": [3024, 2048, 1024]},
    ),
    Published(
        "CogVideoX1.5 5B, stock splash",
        "v6e-1",
        3.38,
        "gpu-tpu-pedia, CogVideoX README (640x1280, 61 frames, no guidance)",
        "cogvideox1.5-5b",
        COG,
        (1, 1, 1),
        {"attention": "splash", "attention_blocks": [2048, 1024, 512]},
    ),
    Published(
        "CogVideoX1.5 5B, exp2 kernel",
        "v6e-1",
        2.73,
        "gpu-tpu-pedia, CogVideoX README (640x1280, 61 frames, no guidance)",
        "cogvideox1.5-5b",
        COG,
        (1, 1, 1),
        EXP2,
    ),
)
