"""Every kind of Wan, upstream's pipeline as it is. Oracle: the same pipeline without the TPU path, same weights and generator."""

import jax
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import tiny
from conftest import relative
from diffusers import tpu
from diffusers.tpu import bridge
from diffusers.video_processor import VideoProcessor


ODD = {"height": 48}  # 9 tokens a frame: no axis of these meshes divides them
LONG = {"num_frames": 81}
PAIR = {"prompt": [tiny.WORDS, "a circle moving"]}


def both(kind, mesh, glue="auto", **changes):
    """(ours, upstream's) frames; the pipeline is left on the TPU path."""
    pipe = tiny.make(kind, seed=int(np.random.default_rng().integers(1 << 31)))
    given = tiny.arguments(kind, generator=None, **changes)
    theirs = np.asarray(pipe(**given, generator=tiny.fresh()).frames)
    tpu.install(pipe, tpu.TPUConfig(mesh=mesh, glue=glue))
    ours = np.asarray(pipe(**given, generator=tiny.fresh()).frames)
    assert np.isfinite(theirs).all() and theirs.std() > 0.01 and ours.shape == theirs.shape
    return pipe, ours, theirs


@pytest.mark.parametrize(
    "kind, mesh, changes",
    [
        ("wan", (2, 2, 2), ODD | PAIR),
        ("wan_i2v", (2, 4, 1), ODD | PAIR),
        ("wan_ti2v_i2v", (2, 4, 1), LONG),
        ("wan_vace", (2, 4, 1), ODD),
        ("wan_animate", (2, 4, 1), ODD),
    ],
    ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)),
)
def test_video_equals_upstreams(chips, kind, mesh, changes):
    pipe, ours, theirs = both(kind, mesh, **changes)
    assert relative(ours, theirs) < 1e-5  # measured: 2e-7 to 6e-7
    assert pipe._tpu.glue == "resident"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [ODD, LONG], ids=lambda x: "-".join(x))
@pytest.mark.parametrize("kind", tiny.WAN)
def test_every_kind(chips, kind, changes):
    one_at_a_time = kind in ("wan_vace", "wan_animate", "wan_v2v")  # upstream's rule
    mesh = (1, 8, 1) if changes is ODD else (2, 2, 2)
    _, ours, theirs = both(kind, mesh, **(changes if changes is LONG or one_at_a_time else changes | PAIR))
    assert relative(ours, theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny.WAN)
def test_bfloat16_within_upstreams_error(chips, kind):
    """Without guidance, which makes one draw's error as good as random: then four draws are within 0.95 to 1.05."""
    exact, half = tiny.make(kind), tiny.make(kind)
    half.to(torch.bfloat16)
    changes = {
        "num_inference_steps": 2,
        "guidance_scale": 1.0,
        **({"guidance_scale_2": 1.0} if "a14b" in kind else {}),
    }
    given = tiny.arguments(kind, generator=None, **changes)

    def videos(pipe):
        return np.stack(
            [np.asarray(pipe(**given, generator=tiny.fresh(seed)).frames, np.float64) for seed in range(4)]
        )

    oracle, theirs = videos(exact), videos(half)
    tpu.install(half, tpu.TPUConfig(mesh=(2, 2, 2)))
    assert relative(videos(half), oracle) < 1.25 * relative(theirs, oracle)


def test_experts_are_compiled_once_and_nothing_for_a_second_prompt(chips):
    pipe = tiny.make("wan_a14b")
    tpu.install(pipe)
    pipe(**tiny.arguments("wan_a14b"))
    counts = {name: len(part["programs"]) for name, part in tpu.report(pipe)["components"].items()}
    assert counts == {"text_encoder": 1, "transformer": 1, "transformer_2": 1, "vae": 1}
    pipe(**tiny.arguments("wan_a14b", prompt="a circle", num_inference_steps=5, generator=tiny.fresh(3)))
    parts = tpu.report(pipe)["components"]
    assert {name: len(part["programs"]) for name, part in parts.items()} == counts
    calls = [parts[name]["programs"][0]["calls"] for name in ("transformer", "transformer_2")]
    assert min(calls) > 1 and sum(calls) == 3 + 5


def test_latents_stay_on_the_device_between_first_and_last_step(chips, monkeypatch):
    moved, steps = [], []
    on_the_way = type(bridge.environment())

    def watch(name):
        original = getattr(on_the_way, name)

        def watched(self, args):
            sizes = [
                x.size if isinstance(x, jax.Array) else x.numel() for x in tree_leaves(args) if hasattr(x, "shape")
            ]
            moved.extend((name, size) for size in sizes if size > 1)
            return original(self, args)

        monkeypatch.setattr(on_the_way, name, watched)

    watch("j2t_copy")
    watch("t2j_copy")

    pipe = tpu.install(tiny.make("wan_a14b"))
    step = pipe.scheduler.step

    def watched_step(predicted, timestep, latents, **kwargs):
        steps.append(len(moved))
        assert bridge.on_device(latents) and bridge.on_device(predicted)
        return step(predicted, timestep, latents, **kwargs)

    pipe.scheduler.step = watched_step
    pipe(**tiny.arguments("wan_a14b", num_inference_steps=4))
    assert len(steps) == 4 and max((size for _, size in moved[steps[0] : steps[-1]]), default=0) < 16  # coefficients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_leave_the_device_as_bytes(chips, dtype, monkeypatch):
    copied, environment = [], bridge.environment()
    original = type(environment).j2t_copy

    def watched(self, args):
        copied.extend(x.dtype for x in tree_leaves(args) if isinstance(x, jax.Array))
        return original(self, args)

    monkeypatch.setattr(type(environment), "j2t_copy", watched)
    video, processor = torch.randn(2, 3, 5, 9, 7).to(dtype), VideoProcessor()  # some values beyond -1 and 1
    theirs = processor.postprocess_video(video, output_type="pil")
    with environment:
        ours = processor.postprocess_video(environment.moved(video), output_type="pil")
    np.testing.assert_array_equal(*(np.stack([np.stack(frames) for frames in v]) for v in (ours, theirs)))
    assert copied == [np.uint8] * 2


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("wan", {"height": 40}, "divisible by 16"),
        ("wan_v2v", {"height": 40}, "divisible by 16"),
        ("wan_i2v", {"image": None}, "image"),
        ("wan", {"guidance_scale_2": 2.0}, "boundary_ratio"),
    ],
)
def test_what_upstream_refuses_is_refused_before_anything_is_compiled(chips, kind, changes, message):
    pipe = tiny.make(kind)
    tpu.install(pipe)
    with pytest.raises((ValueError, TypeError), match=message):
        pipe(**tiny.arguments(kind, **changes))
    assert not any(runner.programs for runner in pipe._tpu.runners.values())
