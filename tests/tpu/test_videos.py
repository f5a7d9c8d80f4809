"""Upstream's pipelines as they are, whole videos and images. Oracle: the same without the TPU path, same weights and generator."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils._pytree import tree_leaves

import tiny
from conftest import relative
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    CogVideoXDDIMScheduler,
    CogVideoXVideoToVideoPipeline,
    HunyuanVideo15Transformer3DModel,
    LayerSkipConfig,
    SkipLayerGuidance,
    tpu,
)
from diffusers.models.transformers import transformer_hunyuan_video15_flax as plan
from diffusers.tpu import bridge
from diffusers.tpu.compile.call import asked_once
from diffusers.tpu.config import TPUConfig
from diffusers.video_processor import VideoProcessor


# Families: a function from a kind to a pipeline and its call


def seed() -> int:
    return int(np.random.default_rng().integers(1 << 31))


def wan(kind):
    return tiny.make(kind, seed()), lambda **changes: tiny.arguments(kind, generator=None, **changes)


def hunyuan15(kind):
    """`distilled`, `unguided` and `three` branches are text's or an image's."""
    name, _, how = kind.partition(" ")
    made = {"text": "hunyuan15", "image": "hunyuan15_i2v"}[name]
    pipe = tiny.make(made, seed())
    pipe.vae.enable_slicing()  # upstream's attention refuses two videos at once
    if how in ("unguided", "distilled"):
        pipe.guider = ClassifierFreeGuidance(guidance_scale=3.0, enabled=False)
    if how == "distilled":  # in steps
        pipe.transformer = type(pipe.transformer).from_config(pipe.transformer.config, use_meanflow=True).eval()
    if how == "three":
        skip = LayerSkipConfig(
            indices=[1], fqn="transformer_blocks", skip_attention=False, skip_attention_scores=False, skip_ff=True
        )
        pipe.guider = SkipLayerGuidance(
            guidance_scale=3.0, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0, skip_layer_config=skip
        )
    return pipe, lambda **changes: tiny.arguments(made, generator=None, **changes)


LLAVA = {  # the published template's places, of this tokenizer and four patches
    "template": "<bos> <|image_pad|> describe: {} <|end_header_id|> a <|end_header_id|> b <|end_header_id|> tell",
    "crop_start": 8, "image_emb_start": 3, "image_emb_end": 7, "image_emb_len": 4,
}  # fmt: skip


def hunyuan(kind):
    given = {"prompt": "a red circle moving", "height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 2}
    given |= {"output_type": "np", "negative_prompt": "bad", "true_cfg_scale": 3.0}
    if kind == "hunyuan_i2v":
        given |= {"prompt_template": LLAVA, "image_embed_interleave": 2}
    if kind == "hunyuan_framepack":
        given |= {"height": 64, "latent_window_size": 1}
        del given["negative_prompt"], given["true_cfg_scale"]
    if kind != "hunyuan":
        given["image"] = tiny.picture(given["height"], given["width"])
    return tiny.make(kind), lambda **changes: given | changes


def cogvideox(kind):
    given = {"prompt": "a red circle", "height": 16, "width": 32, "num_frames": 9, "num_inference_steps": 3}
    given |= {"output_type": "np", "guidance_scale": 4.0}
    if kind == "video":
        pipe = CogVideoXVideoToVideoPipeline(**tiny.cogvideox_5b().components)
        given |= {"video": tiny.pictures(9, 16, 32), "strength": 0.7, "use_dynamic_cfg": True}
    else:
        pipe = tiny.make(f"cogvideox_{kind}")
    if kind == "control":  # upstream's loop calls it without what DPM needs
        pipe.scheduler = CogVideoXDDIMScheduler.from_config(pipe.scheduler.config)
        given |= {"control_video": tiny.pictures(9, 16, 32)}
    if kind == "i2v":
        given |= {"image": tiny.picture(64, 96), "height": 64, "width": 96}  # learned positions are of one size
    if kind in ("video", "control"):
        del given["num_frames"]
    return pipe, lambda **changes: given | changes


def ltx(kind):
    """A condition says where each token is."""
    given = {"prompt": "a red circle", "height": 64, "width": 96, "num_frames": 9, "max_sequence_length": 16}
    given |= {"num_inference_steps": 3, "output_type": "np", "guidance_scale": 3.0}
    given |= {"image": tiny.picture(64, 96)} if kind != "text" else {}
    given |= {"decode_timestep": 0.05} if kind == "condition" else {}
    name = {"text": "ltx", "image": "ltx_i2v", "condition": "ltx_095"}[kind]
    return tiny.make(name), lambda **changes: given | changes


def image(kind):
    pipe = tiny.make({"flux": "flux_small"}.get(kind, kind))
    if kind == "qwen":
        pipe.prompt_template_encode_start_idx = 3  # words of its template, by this tokenizer
    given = {"prompt": "a red circle moving", "height": 48, "width": 80, "num_inference_steps": 2, "output_type": "np"}
    given |= {"guidance_scale": 4.0} if kind == "sd3" else {"negative_prompt": "bad", "true_cfg_scale": 3.0}
    return pipe, lambda **changes: given | changes


def assert_upstreams(made, mesh, changes):
    """What the call gives on the chips of this mesh is upstream's: every model compiled, the loop's tensors on the device."""
    pipe, call = made
    given = call(**changes)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            tiny.with_uneven_norms(module)
    pipe.set_progress_bar_config(disable=True)

    def outputs():
        made = pipe(**given, generator=tiny.fresh(3))
        return np.asarray(made.frames if "frames" in made else made.images)

    expected = outputs()
    tpu.install(pipe, TPUConfig(mesh=mesh))
    found = outputs()
    assert expected.std() > 0.01 and found.shape == expected.shape
    assert relative(found, expected) < 1e-5  # measured: 2e-7 to 6e-7
    report = tpu.report(pipe)
    assert report["glue"] == "resident" and not report["on_host"]
    assert not any(part["eager"] for part in report["components"].values())
    return pipe


ODD = {"height": 48}  # 9 tokens a frame: no axis of these meshes divides them
PAIR = {"prompt": ["a red circle", "a circle moving left"]}
GLYPHS = {"height": 48, "width": 80, "prompt": ["a red circle moving left", 'a circle with "left" on it, moving']}
VIDEOS = [
    (wan, "wan", (2, 2, 2), ODD | PAIR),
    (wan, "wan_i2v", (2, 4, 1), ODD | PAIR),
    (wan, "wan_ti2v_i2v", (2, 4, 1), {"num_frames": 81}),
    (wan, "wan_vace", (2, 4, 1), ODD),
    (wan, "wan_animate", (2, 4, 1), ODD),
    (hunyuan15, "text", (2, 4, 1), GLYPHS),
    (hunyuan15, "text three", (1, 8, 1), {"height": 48, "width": 80}),
    (hunyuan15, "image", (2, 4, 1), {"num_frames": 9}),
    (hunyuan15, "image distilled", (1, 1, 1), {}),
    (hunyuan, "hunyuan", (2, 4, 1), PAIR | {"negative_prompt": ["", "bad"]}),
    (hunyuan, "hunyuan_i2v", (2, 2, 2), {}),
    (cogvideox, "2b", (2, 4, 1), PAIR | {"negative_prompt": ["", "bad"]}),
    (cogvideox, "i2v", (1, 1, 1), {}),
    (cogvideox, "video", (2, 2, 2), {}),
    (ltx, "text", (1, 2, 2), PAIR),
    (ltx, "image", (2, 4, 1), {}),
    (ltx, "condition", (2, 2, 1), {}),
]
SLOW = [
    (hunyuan, "hunyuan_skyreels_i2v", (2, 4, 1), {}),
    (hunyuan, "hunyuan_framepack", (1, 4, 1), {}),
    (cogvideox, "control", (2, 4, 1), {}),
    *(
        (wan, kind, (1, 8, 1), ODD | ({} if kind in ("wan_vace", "wan_animate", "wan_v2v") else PAIR))
        for kind in tiny.WAN
    ),
    *((wan, kind, (2, 2, 2), {"num_frames": 81}) for kind in tiny.WAN),
]


def named(value):
    return getattr(value, "__name__", value) if not isinstance(value, (dict, tuple)) else ""


@pytest.mark.parametrize(
    "family, kind, mesh, changes",
    [*VIDEOS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=named,
)
def test_video_equals_upstreams(chips, family, kind, mesh, changes):
    assert_upstreams(family(kind), mesh, changes)


@pytest.mark.parametrize("kind, mesh", [("flux", (1, 8, 1)), ("qwen", (2, 4, 1)), ("sd3", (2, 2, 2))])
def test_image_equals_upstreams(chips, kind, mesh):
    torch.manual_seed(0)
    pipe = assert_upstreams(image(kind), mesh, {} if kind != "sd3" else PAIR)
    (program,) = tpu.report(pipe)["components"]["transformer"]["programs"]
    # Qwen-Image's branches run side by side, of texts that differ in length
    assert program["calls"] == (4 if kind == "flux" else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, kind, draws",
    [
        *((wan, kind, 4) for kind in tiny.WAN),
        *((cogvideox, kind, draws) for kind, draws in (("2b", 4), ("5b", 4), ("i2v", 8))),
        *((hunyuan15, f"{kind} unguided", draws) for kind, draws in (("text", 4), ("image", 16))),
    ],
    ids=named,
)
def test_bfloat16_within_upstreams_error(chips, family, kind, draws):
    """Without guidance, which makes one draw's error as good as random; so does the image of a VAE of random weights."""
    half, call = family(kind)
    half.set_progress_bar_config(disable=True)
    exact = copy.deepcopy(half)
    half.to(torch.bfloat16)
    given = call(num_inference_steps=2, **({} if family is hunyuan15 else {"guidance_scale": 1.0}))
    given |= {"guidance_scale_2": 1.0} if "a14b" in kind else {}

    def videos(pipe):
        generators = (torch.Generator().manual_seed(seed) for seed in range(draws))
        return np.stack([np.asarray(pipe(**given, generator=g).frames, np.float64) for g in generators])

    oracle, theirs = videos(exact), videos(half)
    tpu.install(half, TPUConfig(mesh=(2, 2, 2)))
    assert relative(videos(half), oracle) < 1.25 * relative(theirs, oracle)


# Wan


def test_experts_are_compiled_once_and_nothing_for_a_second_prompt(chips):
    pipe = tpu.install(tiny.make("wan_a14b"))
    pipe(**tiny.arguments("wan_a14b"))
    counts = {name: len(part["programs"]) for name, part in tpu.report(pipe)["components"].items()}
    assert counts == {"text_encoder": 1, "transformer": 1, "transformer_2": 1, "vae": 1}
    pipe(**tiny.arguments("wan_a14b", prompt="a circle", num_inference_steps=5, generator=tiny.fresh(3)))
    parts = tpu.report(pipe)["components"]
    assert {name: len(part["programs"]) for name, part in parts.items()} == counts
    calls = [parts[name]["programs"][0]["calls"] for name in ("transformer", "transformer_2")]
    assert min(calls) > 1 and sum(calls) == 3 + 5


@pytest.fixture
def copies(monkeypatch) -> list:
    """(way, size, dtype) of each array that crosses between host and device from here on."""
    seen, environment = [], type(bridge.environment())

    def watch(name):
        original = getattr(environment, name)

        def watched(self, args):
            for x in tree_leaves(args):
                if hasattr(x, "shape"):
                    seen.append((name, x.size if isinstance(x, jax.Array) else x.numel(), x.dtype))
            return original(self, args)

        monkeypatch.setattr(environment, name, watched)

    watch("j2t_copy")
    watch("t2j_copy")
    return seen


def test_latents_stay_on_the_device_between_first_and_last_step(chips, copies):
    pipe, steps = tpu.install(tiny.make("wan_a14b")), []
    step = pipe.scheduler.step

    def watched_step(predicted, timestep, latents, **kwargs):
        steps.append(len(copies))
        assert bridge.on_device(latents) and bridge.on_device(predicted)
        return step(predicted, timestep, latents, **kwargs)

    pipe.scheduler.step = watched_step
    pipe(**tiny.arguments("wan_a14b", num_inference_steps=4))
    between = [size for _, size, _ in copies[steps[0] : steps[-1]]]
    assert len(steps) == 4 and max(between, default=0) < 16  # coefficients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_leave_the_device_as_bytes(chips, dtype, copies):
    video, processor = torch.randn(2, 3, 5, 9, 7).to(dtype), VideoProcessor()  # some values beyond -1 and 1
    theirs = processor.postprocess_video(video, output_type="pil")
    with bridge.environment() as environment:
        ours = processor.postprocess_video(environment.moved(video), output_type="pil")
    np.testing.assert_array_equal(*(np.stack([np.stack(frames) for frames in v]) for v in (ours, theirs)))
    assert [dtype for way, _, dtype in copies if way == "j2t_copy"] == [np.uint8] * 2


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("wan_v2v", {"height": 40}, "divisible by 16"),
        ("wan_i2v", {"image": None}, "image"),
        ("wan", {"guidance_scale_2": 2.0}, "boundary_ratio"),
    ],
)
def test_what_upstream_refuses_is_refused_before_anything_is_compiled(chips, kind, changes, message):
    pipe = tpu.install(tiny.make(kind))
    with pytest.raises((ValueError, TypeError), match=message):
        pipe(**tiny.arguments(kind, **changes))
    assert not any(runner.programs for runner in pipe._tpu.runners.values())


# HunyuanVideo-1.5


def test_the_video_depends_on_the_image_and_prompts_of_ten_lengths_share_programs(chips):
    """Without glyphs their encoder is not asked; with them for each prompt by itself."""
    pipe, call = hunyuan15("image")
    pipe.set_progress_bar_config(disable=True)
    tpu.install(pipe, TPUConfig(mesh=(2, 4, 1)))
    red, other = (
        np.asarray(pipe(**call(image=picture), generator=tiny.fresh()).frames)
        for picture in (PIL.Image.new("RGB", (48, 32), "red"), tiny.picture(32, 48))
    )
    assert relative(red, other) > 0.01
    for words in range(10):
        prompts = {"prompt": "moving " * words + '"left"' * (words % 3), "negative_prompt": "a " * (9 - words)}
        pipe(**call(num_inference_steps=1, output_type="latent", **prompts), generator=tiny.fresh())
    parts = tpu.report(pipe)
    made = {name: len(part["programs"]) for name, part in parts["components"].items() if name != "vae"}
    assert made == {"text_encoder": 1, "text_encoder_2": 1, "image_encoder": 1, "transformer": 1}
    assert not parts["on_host"] and not any(part["eager"] for part in parts["components"].values())


def test_whether_there_is_an_image_is_asked_once_until_the_tensor_is_written_to(chips, monkeypatch):
    """Two branches of two steps; the answer waits for the device."""
    asked = []
    monkeypatch.setattr(plan, "_is_zero", asked_once(lambda tensor: asked.append(1) or not bool(tensor.any())))
    pipe, call = hunyuan15("image")
    tpu.install(pipe, TPUConfig(mesh=(2, 1, 1)))
    pipe(**call(num_inference_steps=2), generator=tiny.fresh())
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
