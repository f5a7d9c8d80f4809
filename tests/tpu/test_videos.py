"""Upstream's pipelines as they are, whole videos and images. Oracle: the same without the TPU path, same weights and generator."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils._pytree import tree_leaves

import tiny
from conftest import relative, slow
from diffusers import tpu
from diffusers.models.transformers import transformer_hunyuan_video15_flax as plan
from diffusers.tpu import bridge
from diffusers.tpu.common.config import TPUConfig
from diffusers.tpu.compile.call import asked_once
from diffusers.tpu.compile.programs import Program
from diffusers.video_processor import VideoProcessor


def made(kind: str, changes: dict = {}):
    seed = int(np.random.default_rng().integers(1 << 31)) if kind.startswith(("wan", "hunyuan15")) else 0
    pipe = tiny.make(kind, seed, **changes)
    if kind.startswith("hunyuan15"):
        pipe.vae.enable_slicing()  # upstream's attention refuses two videos at once
    if kind == "qwen":
        pipe.prompt_template_encode_start_idx = 3  # words of its template, by this tokenizer
    return pipe


def assert_upstreams(kind, parts, mesh, given):
    """What the call gives on the chips of this mesh is upstream's: every model compiled, the loop's tensors on the device."""
    pipe = made(kind, parts)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            tiny.with_uneven_norms(module)

    def outputs():
        found = pipe(**{**given, "generator": tiny.fresh(3)})
        return np.asarray(found.frames if "frames" in found else found.images)

    expected = outputs()
    tpu.install(pipe, TPUConfig(mesh=mesh))
    found = outputs()
    assert np.isfinite(expected).all() and expected.std() > 0.01 and found.shape == expected.shape
    assert relative(found, expected) < 1e-5  # measured: 2e-7 to 7e-7
    report = tpu.report(pipe)
    assert report["glue"] == "resident" and not report["on_host"]
    assert not any(part["eager"] for part in report["components"].values())
    return pipe


ODD = {"height": 48}  # 9 tokens a frame: no axis of these meshes divides them
PAIR = {"prompt": ["a red circle", "a circle moving left"]}
PAIRS = PAIR | {"negative_prompt": ["", "bad"]}
GLYPHS = {"height": 48, "width": 80, "prompt": ["a red circle moving left", 'a circle with "left" on it, moving']}
UNGUIDED = {"guider": {"enabled": False}}
SKIPPING = {
    "_": "SkipLayerGuidance", "guidance_scale": 3.0, "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0,
    "skip_layer_config": {
        "_": "LayerSkipConfig", "indices": [1], "fqn": "transformer_blocks", "skip_attention": False,
        "skip_attention_scores": False, "skip_ff": True,
    },
}  # fmt: skip
VIDEOS = [  # pipeline, changes of its parts, mesh, changes of the call
    ("wan", {}, (2, 2, 2), ODD | PAIR),
    ("wan_i2v", {}, (2, 4, 1), ODD | PAIR),
    ("hunyuan15", {}, None, GLYPHS),
    ("cogvideox_i2v", {}, (1, 1, 1), {}),
]
SLOW = [
    ("wan", {}, None, {}),
    ("cogvideox", {}, None, {}),
    ("cogvideox_2b", {}, (2, 4, 1), PAIRS),
    ("ltx", {}, (1, 2, 2), PAIR),
    ("wan", {}, (1, 3, 1), {}),
    ("hunyuan", {}, (2, 4, 1), PAIRS),
    ("wan", {}, (1, 1, 1), {}),
    ("wan_ti2v_i2v", {}, (2, 4, 1), {"num_frames": 81}),
    ("wan_vace", {}, (2, 4, 1), ODD),
    ("wan_animate", {}, (2, 4, 1), ODD),
    ("hunyuan15", {"guider": SKIPPING}, (1, 8, 1), {"height": 48, "width": 80}),
    ("hunyuan15_i2v", {"transformer": {"use_meanflow": True}, **UNGUIDED}, (1, 1, 1), {}),
    ("hunyuan_i2v", {}, (2, 2, 2), {}),
    ("cogvideox_v2v", {}, (2, 2, 2), {}),
    ("ltx_i2v", {}, (2, 4, 1), {}),
    ("ltx_095", {}, (2, 2, 1), {}),  # a condition says where each token is
    ("hunyuan_skyreels_i2v", {}, (2, 4, 1), {}),
    ("hunyuan_framepack", {}, (1, 4, 1), {}),
    ("cogvideox_control", {"scheduler": "@cogvideox_ddim"}, (2, 4, 1), {}),  # upstream's loop lacks what DPM needs
    *(
        (kind, {}, (1, 8, 1), ODD | ({} if kind in ("wan_vace", "wan_animate", "wan_v2v") else PAIR))
        for kind in tiny.WAN
    ),
    *((kind, {}, (2, 2, 2), {"num_frames": 81}) for kind in tiny.WAN),
]


@pytest.mark.parametrize(
    "kind, parts, mesh, changes",
    [*VIDEOS, *(slow(*case) for case in SLOW)],
    ids=lambda value: (
        "" if isinstance(value, dict) else "x".join(map(str, value)) if isinstance(value, tuple) else value
    ),
)
def test_video_equals_upstreams(chips, kind, parts, mesh, changes):
    assert_upstreams(kind, parts, mesh, tiny.arguments(kind, **changes))


CFG = {"negative_prompt": "bad", "true_cfg_scale": 3.0}
IMAGES = [  # the denoiser's calls of two steps: Qwen-Image's branches run side by side, of texts that differ in length
    slow("flux_small", (1, 8, 1), CFG, "transformer", 4),
    ("qwen", (2, 4, 1), CFG, "transformer", 2),
    slow("sd3", (2, 2, 2), PAIR | {"guidance_scale": 4.0}, "transformer", 2),
    slow("sdxl", None, {"guidance_scale": 5.0, "guidance_rescale": 0.7}, "unet", 2),
]


@pytest.mark.parametrize("kind, mesh, changes, denoiser, calls", IMAGES, ids=["flux_small", "qwen", "sd3", "sdxl"])
def test_image_equals_upstreams(chips, kind, mesh, changes, denoiser, calls):
    torch.manual_seed(0)
    pipe = assert_upstreams(kind, {}, mesh, tiny.arguments(kind, height=48, width=80, **changes))
    (program,) = tpu.report(pipe)["components"][denoiser]["programs"]
    assert program["calls"] == calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, parts, draws",
    [
        *((kind, {}, 4) for kind in (*tiny.WAN, "cogvideox_2b", "cogvideox_5b")),
        ("cogvideox_i2v", {}, 8), ("hunyuan15", UNGUIDED, 4), ("hunyuan15_i2v", UNGUIDED, 16),
        *((kind, {}, 8) for kind in ("flux_small", "sd3", "qwen")),
    ],
)  # fmt: skip
def test_bfloat16_within_upstreams_error(chips, kind, parts, draws):
    """Without guidance, which makes one draw's error as good as random; so does the image of a VAE of random weights."""
    half = made(kind, parts)
    exact = copy.deepcopy(half)
    half.to(torch.bfloat16)
    guidance = {} if parts else {"guidance_scale": 1.0} | ({"guidance_scale_2": 1.0} if "a14b" in kind else {})
    given = tiny.arguments(kind, num_inference_steps=2, **guidance)

    def videos(pipe):
        generators = map(tiny.fresh, range(draws))
        return np.stack([np.asarray(pipe(**{**given, "generator": g})[0], np.float64) for g in generators])

    oracle, theirs = videos(exact), videos(half)
    tpu.install(half, TPUConfig(mesh=(2, 2, 2)))
    assert relative(videos(half), oracle) < 1.25 * relative(theirs, oracle)


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


@pytest.mark.parametrize("kind", [slow("wan"), "wan_a14b"])
def test_one_compilation_for_all_steps_experts_and_prompts_and_latents_stay_on_the_device(chips, copies, kind):
    pipe, steps = tpu.install(tiny.make(kind)), []
    step = pipe.scheduler.step

    def watched_step(predicted, timestep, latents, **kwargs):
        steps.append(len(copies))
        assert bridge.on_device(latents) and bridge.on_device(predicted)
        return step(predicted, timestep, latents, **kwargs)

    models = {"text_encoder", "transformer", "vae", *(["transformer_2"] if kind == "wan_a14b" else [])}
    for changes in ({}, {"prompt": "a circle", "num_inference_steps": 5}):
        pipe.scheduler.step = watched_step if not changes else step
        pipe(**tiny.arguments(kind, **changes))
        parts = tpu.report(pipe)["components"]
        assert {name: len(part["programs"]) for name, part in parts.items()} == dict.fromkeys(models, 1)
    between = [size for _, size, _ in copies[steps[0] : steps[-1]]]
    assert len(steps) == 3 and max(between, default=0) < 16  # coefficients
    programs = [part["programs"][0] for name, part in parts.items() if name.startswith("transformer")]
    calls = [program["calls"] for program in programs]
    assert min(calls) > 1 and sum(calls) == 3 + 5 and {program["branches"] for program in programs} == {2}
    pipe(**tiny.arguments(kind, height=48))
    assert len(tpu.report(pipe)["components"]["transformer"]["programs"]) == 2


def test_weights_are_split_where_a_program_has_no_room_beside_them(chips, own_store, monkeypatch, warned):
    """Those that each chip had whole; the call that waits for its branch meanwhile runs beside it still."""
    pipe = made("wan")
    expected = np.asarray(pipe(**tiny.arguments("wan")).frames)
    tpu.install(pipe, TPUConfig(mesh=(2, 4, 1), hbm_gib=1, reserve_gib=0))
    runner, compile_it = pipe.transformer._tpu_runner, Program.compile
    assert runner.storage

    def compiled(program):
        if program.name == runner.name and runner.storage:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
        return compile_it(program)

    monkeypatch.setattr(Program, "compile", compiled)
    assert relative(np.asarray(pipe(**tiny.arguments("wan")).frames), expected) < 1e-5
    (program,) = tpu.report(pipe)["components"]["transformer"]["programs"]
    assert (runner.storage, program["branches"], program["calls"]) == (frozenset(), 2, 3)
    assert [sentence for sentence in warned if "split over the chips from here on" in sentence]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_leave_the_device_as_bytes(chips, dtype, copies):
    video, processor = torch.randn(2, 3, 5, 9, 7).to(dtype), VideoProcessor()  # some values beyond -1 and 1
    theirs = processor.postprocess_video(video, output_type="pil")
    with bridge.environment() as environment:
        ours = processor.postprocess_video(environment.moved(video), output_type="pil")
    np.testing.assert_array_equal(*(np.stack([np.stack(frames) for frames in v]) for v in (ours, theirs)))
    assert [dtype for way, _, dtype in copies if way == "j2t_copy"] == [np.uint8] * 2


def test_what_upstream_refuses_is_refused_before_anything_is_compiled(chips):
    for kind, changes, message in (
        ("wan_v2v", {"height": 40}, "divisible by 16"),
        ("wan_i2v", {"image": None}, "image"),
        ("wan", {"guidance_scale_2": 2.0}, "boundary_ratio"),
    ):
        pipe = tpu.install(tiny.make(kind))
        with pytest.raises((ValueError, TypeError), match=message):
            pipe(**tiny.arguments(kind, **changes))
        assert not any(runner.programs for runner in pipe._tpu.runners.values())


# HunyuanVideo-1.5


@pytest.fixture
def asked(monkeypatch) -> list:
    """An entry each time that a tensor is read to see whether there is an image."""
    times = []
    monkeypatch.setattr(plan, "_is_zero", asked_once(lambda tensor: times.append(1) or not bool(tensor.any())))
    return times


def test_the_video_is_of_its_image_and_prompts_of_four_lengths_share_programs(chips, asked):
    """Whether there is an image is asked once, which waits for the device. Glyphs' encoder is called for prompts that have some, one by one."""
    call = functools.partial(tiny.arguments, "hunyuan15_i2v")
    pipe = assert_upstreams("hunyuan15_i2v", {}, (2, 4, 1), call(num_frames=9))
    assert asked == [1]
    images = PIL.Image.new("RGB", (48, 32), "red"), tiny.picture(32, 48)
    red, other = (pipe(**call(image=image, num_frames=9, output_type="latent")).frames for image in images)
    assert relative(red, other) > 0.01
    for words in (0, 1, 5, 9):
        prompts = {"prompt": "moving " * words + '"left"' * (words % 3), "negative_prompt": "a " * (9 - words)}
        pipe(**call(num_frames=9, num_inference_steps=1, output_type="latent", **prompts))
    parts = tpu.report(pipe)
    counts = {name: len(part["programs"]) for name, part in parts["components"].items() if name != "vae"}
    assert counts == {"text_encoder": 1, "text_encoder_2": 1, "image_encoder": 1, "transformer": 1}
    assert not parts["on_host"] and not any(part["eager"] for part in parts["components"].values())


def test_whether_there_is_an_image_is_asked_again_of_a_tensor_that_is_written_to(chips, asked):
    for zeros in (torch.zeros(1, 4, 16), bridge.to_torch(jnp.zeros((1, 4, 16)))):
        asked.clear()
        with bridge.environment():
            for written, answer in ((0.0, True), (1.0, False), (0.0, True)):
                zeros[0, -1, -1] = written
                given = {"image_embeds": zeros}
                assert plan.decide_is_t2v(given) == plan.decide_is_t2v(given) == {"is_t2v": answer}
        assert len(asked) == 3
