"""HunyuanVideo-1.5, upstream's pipelines as they are. Oracle: the same pipeline without the TPU path, same weights and generator."""

import copy

import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import torch

import tiny
from conftest import relative
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    HunyuanVideo15Transformer3DModel,
    LayerSkipConfig,
    SkipLayerGuidance,
    tpu,
)
from diffusers.models.transformers import transformer_hunyuan_video15_flax as plan
from diffusers.tpu import bridge
from diffusers.tpu.compile.call import asked_once


ODD = {"height": 48, "width": 80}  # 15 tokens a frame: no axis of these meshes divides them
PAIR = {"prompt": ["a red circle moving left", 'a circle with "left" on it, moving']}  # glyphs in one of them
NO_GUIDANCE = ClassifierFreeGuidance(guidance_scale=3.0, enabled=False)
THREE = SkipLayerGuidance(
    guidance_scale=3.0,
    skip_layer_guidance_start=0.0,
    skip_layer_guidance_stop=1.0,
    skip_layer_config=LayerSkipConfig(
        indices=[1], fqn="transformer_blocks", skip_attention=False, skip_attention_scores=False, skip_ff=True
    ),
)


MEANFLOW = {"use_meanflow": True}  # of the step-distilled models


def built(kind, guider=None, config=None):
    pipe = tiny.make(kind, seed=int(np.random.default_rng().integers(1 << 31)))
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.enable_slicing()  # upstream's attention refuses two videos at once
    if guider is not None:
        pipe.guider = guider.new()
    if config is not None:
        changed = type(pipe.transformer).from_config(pipe.transformer.config, **config)
        pipe.transformer = tiny.with_uneven_norms(changed.eval())
    return pipe


def both(kind, mesh, guider=None, config=None, **changes):
    """(pipeline on the TPU path, its frames, upstream's)."""
    pipe = built(kind, guider, config)
    given = {**tiny.arguments(kind), **changes}
    theirs = np.asarray(pipe(**given).frames)
    tpu.install(pipe, tpu.TPUConfig(mesh=mesh))
    ours = np.asarray(pipe(**{**given, "generator": tiny.arguments(kind)["generator"]}).frames)
    assert np.isfinite(theirs).all() and theirs.std() > 0.01 and ours.shape == theirs.shape
    return pipe, ours, theirs


@pytest.mark.parametrize(
    "kind, mesh, guider, changes",
    [
        ("hunyuan15", (2, 4, 1), None, ODD | PAIR),
        ("hunyuan15", (1, 8, 1), THREE, ODD),
        ("hunyuan15_i2v", (2, 4, 1), None, {"num_frames": 9}),
        ("hunyuan15_i2v", (1, 1, 1), NO_GUIDANCE, {"config": MEANFLOW}),
    ],
    ids=["odd-pair", "three-branches", "image", "image-distilled"],
)
def test_video_equals_upstreams(chips, kind, mesh, guider, changes):
    pipe, ours, theirs = both(kind, mesh, guider, **changes)
    assert relative(ours, theirs) < 1e-5
    assert pipe._tpu.glue == "resident"
    assert not tpu.report(pipe)["on_host"]


@pytest.mark.slow
@pytest.mark.parametrize("kind, draws", [("hunyuan15", 4), ("hunyuan15_i2v", 16)])
def test_bfloat16_within_upstreams_error(chips, kind, draws):
    """Without guidance, which makes one draw's error as good as random; so does the image of a VAE of random weights."""
    half = built(kind, NO_GUIDANCE)
    exact = copy.deepcopy(half)
    half.to(torch.bfloat16)

    def videos(pipe):
        generators = (torch.Generator().manual_seed(seed) for seed in range(draws))
        return np.stack(
            [
                np.asarray(pipe(**{**tiny.arguments(kind, num_inference_steps=2), "generator": g}).frames, np.float64)
                for g in generators
            ]
        )

    oracle, theirs = videos(exact), videos(half)
    tpu.install(half, tpu.TPUConfig(mesh=(2, 2, 2)))
    assert relative(videos(half), oracle) < 1.25 * relative(theirs, oracle)


def test_the_video_depends_on_the_image_and_prompts_of_ten_lengths_share_programs(chips):
    """Without glyphs their encoder is not asked; with them for each prompt by itself."""
    pipe, ours, _ = both("hunyuan15_i2v", (2, 4, 1))
    given = tiny.arguments("hunyuan15_i2v")
    red = PIL.Image.new("RGB", (48, 32), "red")
    assert relative(np.asarray(pipe(**{**given, "image": red}).frames), ours) > 0.01
    given |= {"num_inference_steps": 1, "output_type": "latent"}
    for words in range(10):
        pipe(**{**given, "prompt": "moving " * words + '"left"' * (words % 3), "negative_prompt": "a " * (9 - words)})
    parts = tpu.report(pipe)
    made = {name: len(part["programs"]) for name, part in parts["components"].items() if name != "vae"}
    assert made == {"text_encoder": 1, "text_encoder_2": 1, "image_encoder": 1, "transformer": 1}
    assert not parts["on_host"] and not any(part["eager"] for part in parts["components"].values())


def test_whether_there_is_an_image_is_asked_once_until_the_tensor_is_written_to(chips, monkeypatch):
    """Two branches of two steps, and another call of the same images; the answer waits for the device."""
    asked = []
    monkeypatch.setattr(plan, "_is_zero", asked_once(lambda tensor: asked.append(1) or not bool(tensor.any())))
    pipe, _, _ = both("hunyuan15_i2v", (2, 1, 1), num_inference_steps=2)
    assert asked == [1]
    for zeros in (torch.zeros(1, 4, 16), bridge.to_torch(jnp.zeros((1, 4, 16)))):
        asked.clear()
        with bridge.environment():
            for written, answer in ((0.0, True), (1.0, False), (0.0, True)):
                zeros[0, -1, -1] = written
                given = {"image_embeds": zeros}
                assert plan.decide_is_t2v(given) == plan.decide_is_t2v(given) == {"is_t2v": answer}
        assert len(asked) == 3


@pytest.mark.parametrize("cls", [HunyuanVideo15Transformer3DModel, AutoencoderKLHunyuanVideo15])
def test_original_weights_are_for_upstreams_conversion_script(cls, tmp_path):
    """What the page says of `from_single_file`; where upstream learns it, the page has to."""
    with pytest.raises((ValueError, AttributeError), match="only compatible with|no attribute"):
        cls.from_single_file(str(tmp_path / "x.safetensors"))
