"""Idioms of scripts around models and pipelines. Oracle: the same lines with the path off, same weights and seeds."""

import copy
import dataclasses
import gc
import random
import weakref

import numpy as np
import pytest
import torch

import tiny
from conftest import relative
from diffusers import AutoencoderKLWan, StableDiffusionControlNetPipeline, WanPipeline, tpu
from diffusers.tpu.pipelines import attach


pytestmark = pytest.mark.usefixtures("idioms")
idiom = pytest.mark.idiom
FP32 = 1e-5  # measured: 3e-7 to 1.2e-6


@pytest.fixture(scope="module")
def plain(idioms):
    """A tiny Wan that never meets the TPU path."""
    return tiny.wan()


@pytest.fixture(scope="module")
def theirs(plain):
    """What upstream makes of the call."""
    return np.asarray(plain(**call()).frames)


@pytest.fixture(scope="module")
def wan(idioms):
    """Its twin, which each test finds installed or not, and leaves as it was built."""
    yield (pipe := tiny.wan())
    tpu.uninstall(pipe)


@pytest.fixture
def installed(wan):
    return tpu.install(wan)


@pytest.fixture(scope="module")
def pair(idioms):
    """A tiny Stable Diffusion that never meets the TPU path, and its twin, with the default configuration."""
    theirs, ours = (tiny.sd(safety_checker=None) for _ in range(2))
    return theirs, tpu.install(ours)


def pictures(pipe, **changes) -> np.ndarray:
    return pipe(**tiny.arguments("image", **changes)).images


def call(**changes):
    """Arguments of a picture: its programs are small."""
    return {**tiny.arguments("wan"), "num_frames": 1, **changes}


def on_chips(*modules) -> list[bool]:
    return [bool(r and tpu.report(m)["on_chips"]) for m in modules for r in [attach.runs(m)]]


def programs(module) -> int:
    """Compiled here, or found in the store."""
    return len(tpu.report(module)["programs"])


# Models by themselves


@idiom("model-to-cuda", "text-encoder-to-cuda")
def test_a_model_moved_by_itself_is_compiled(plain):
    vae = copy.deepcopy(plain.vae)
    latents = torch.randn(1, 16, 1, 4, 6)
    expected = vae.decode(latents).sample.detach()
    for move in (lambda: vae.to("cuda"), lambda: vae.cuda(), lambda: vae.to(device="tpu:0"), lambda: vae.to(0)):
        assert move() is vae and on_chips(vae) == [True]
    for device in (vae.device, "cpu"):
        ours = vae.decode(latents.to(device)).sample
        assert type(ours) is torch.Tensor and relative(ours, expected) < FP32
    assert vae.device.type == "cuda" and programs(vae) == 1
    runner = attach.runs(vae)
    assert vae.to("cpu") is vae and runner._placed is None and vae.device.type == "cpu"
    assert not {"decode", "_tpu_runner", "_hf_hook", "__getstate__", "__deepcopy__"} & vars(vae).keys()
    assert relative(vae.decode(latents).sample, expected) == 0
    with pytest.raises(ValueError, match=r"devices? among .*'mps'"):
        vae.cuda().to("mps")
    assert vae.cpu() is vae and attach.runs(vae) is None
    encoder, ids = copy.deepcopy(plain.text_encoder), torch.randint(3, 7, (2, 9))
    expected = encoder(ids).last_hidden_state.detach()
    assert encoder.to("cuda", torch.float32) is encoder and on_chips(encoder) == [True]
    assert relative(encoder(ids.to(encoder.device)).last_hidden_state, expected) < FP32
    encoder.to(torch.bfloat16)  # after use: converted, and compiled for it
    ours = encoder(ids).last_hidden_state
    assert ours.dtype == torch.bfloat16 and relative(ours.float(), expected) < 0.02 and programs(encoder) == 2


@idiom("model-install")
def test_a_model_is_installed_with_a_configuration_reported_and_given_back(plain):
    vae, config = copy.deepcopy(plain.vae), tpu.TPUConfig(mesh=(1, 2, 1))
    with pytest.raises(ValueError, match=r"install\(model\)"):
        tpu.report(vae)
    assert tpu.install(vae, config) is tpu.install(vae) is vae
    assert tpu.report(vae)["mesh"] == {"dp": 1, "sp": 2, "tp": 1} and on_chips(vae) == [False]
    tpu.install(vae, tpu.TPUConfig(mesh=(1, 1, 1)))
    assert tpu.report(vae)["mesh"]["sp"] == 1
    with pytest.raises(ValueError, match="TPUConfig.host for a pipeline"):
        tpu.install(vae, tpu.TPUConfig(host=("vae",)))
    assert tpu.uninstall(vae) is tpu.uninstall(vae) is vae and attach.runs(vae) is None


@idiom("own-loop")
def test_a_loop_of_the_users_own(plain):
    def loop(transformer, vae, scheduler):
        generator = torch.Generator().manual_seed(3)
        scheduler.set_timesteps(3, device=transformer.device)
        latents = torch.randn(1, 16, 1, 4, 6, generator=generator, device=transformer.device, dtype=transformer.dtype)
        text = torch.randn(2, 24, 32, generator=generator)
        for t in scheduler.timesteps:
            noise = transformer(torch.cat([latents] * 2), t.expand(2), text.to(transformer.device)).sample
            negative, positive = noise.chunk(2)
            latents = scheduler.step(negative + 4 * (positive - negative), t, latents).prev_sample
        return vae.decode(latents.to(vae.device, vae.dtype)).sample.clamp(-1, 1)

    with torch.no_grad():
        expected = loop(plain.transformer, plain.vae, copy.deepcopy(plain.scheduler))
        transformer, vae = (copy.deepcopy(m).to("cuda") for m in (plain.transformer, plain.vae))
        assert relative(loop(transformer, vae, copy.deepcopy(plain.scheduler)), expected) < FP32
    assert programs(transformer) == 1


@idiom("model-device-map", "device-map")
def test_a_models_own_device_map(plain, tmp_path):
    for name in ("vae", "text_encoder"):
        module = getattr(plain, name)
        module.save_pretrained(tmp_path / name)
        for asked in ("cuda", "auto", {"": 0}):
            loaded = type(module).from_pretrained(tmp_path / name, device_map=asked)
            assert attach.runs(loaded) is not None and loaded.device.type == "cuda" and loaded.hf_device_map == {"": 0}
            assert all(map(torch.equal, loaded.state_dict().values(), module.state_dict().values()))
        assert attach.runs(type(module).from_pretrained(tmp_path / name, device_map="cpu")) is None
        with pytest.raises(NotImplementedError, match="sharded over all chips"):
            type(module).from_pretrained(tmp_path / name, device_map={"encoder": "cuda", "decoder": "cpu"})
    model, info = AutoencoderKLWan.from_pretrained(tmp_path / "vae", device_map="auto", output_loading_info=True)
    assert info["missing_keys"] == [] and attach.runs(model) is not None


@idiom("other-modules")
def test_other_modules_stay_on_the_host_and_it_is_said(plain, said):
    upscaler, x = type("Upscaler", (torch.nn.Module,), {})(), torch.randn(2, 3)
    upscaler.layer = torch.nn.Linear(3, 3)
    expected = upscaler.layer(x)
    for _ in range(2):
        assert upscaler.to("cuda") is upscaler and torch.equal(upscaler.layer(x), expected)
    assert upscaler.to("cuda", torch.float64).layer.weight.dtype == torch.float64
    (message,) = said
    assert "Upscaler stays on the host" in message
    plain.vae.decoder.to("cuda")  # a part moves with its model
    assert len(said) == 1
    upscaler.vae = copy.deepcopy(plain.vae)  # what it is made of does
    assert attach.runs(upscaler.to("cuda").vae) is not None and len(said) == 1


# Models and pipelines


@idiom("earlier-arguments")
def test_an_argument_of_the_earlier_scripts_is_refused_by_name(installed):
    with pytest.raises(TypeError, match="use_dp"):
        installed(**call(use_dp=True))


@idiom("model-into-pipeline")
def test_a_model_moved_by_itself_is_adopted_by_a_pipeline(plain, theirs, tmp_path):
    parts = copy.deepcopy(plain.components)
    vae, transformer = parts["vae"].to("cuda"), tpu.install(parts["transformer"], tpu.TPUConfig(mesh=(2, 1, 1)))
    own = attach.runs(transformer)
    pipe = WanPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.to("cuda") is pipe and pipe.vae is vae
    assert attach.runs(transformer) is own and attach.runs(vae).mesh == own.mesh  # kept; attached anew
    assert relative(pipe(**call()).frames, theirs) < FP32
    pipe.save_pretrained(tmp_path / "wan")
    again = WanPipeline.from_pretrained(tmp_path / "wan", vae=vae)
    assert again.vae is vae and attach.runs(vae) is pipe._tpu.runners["vae"] is again._tpu.runners["vae"]


@idiom("component-moves", "device-asked")
def test_components_that_are_moved_and_the_device_that_a_script_asked_for(plain, theirs):
    def devices():
        return [one.device.type for one in (pipe, pipe.text_encoder, pipe.transformer, pipe.vae)]

    seen = []

    def callback(pipe, step, timestep, values):
        seen.append((*devices(), pipe._execution_device.type))
        return values

    pipe = WanPipeline(**copy.deepcopy(plain.components))
    pipe.transformer.to("cuda")  # by itself, as scripts leave the text encoder on the host
    assert devices() == ["cuda", "cpu", "cuda", "cpu"]
    pipe.to("cuda")
    assert devices() == ["cuda"] * 4 and torch.device("cuda:0") == pipe.device == pipe.transformer.device
    pipe.text_encoder.to("cpu")  # as scripts do when the prompt is encoded
    assert devices() == ["cuda", "cpu", "cuda", "cuda"]
    assert on_chips(pipe.text_encoder, pipe.transformer) == [False, True]
    pipe.text_encoder.to(pipe.device)
    pipe.vae.to(torch.float32), pipe.vae.to("cuda", torch.float32)
    assert relative(pipe(**call(callback_on_step_end=callback)).frames, theirs) < FP32
    assert set(seen) == {("cuda",) * 5} and devices() == ["cuda"] * 4 and on_chips(pipe.text_encoder) == [True]
    for change in (tpu.uninstall, lambda vae: tpu.install(vae, tpu.TPUConfig(mesh=(1, 1, 1)))):
        with pytest.raises(ValueError, match="belongs to an installed WanPipeline"):
            change(pipe.vae)
    pipe.to("cpu")
    assert devices() == ["cpu"] * 4
    tpu.install(pipe, tpu.TPUConfig(host=("vae",)))
    assert devices() == ["cuda", "cuda", "cuda", "cpu"]


@idiom("component-none", "swapped-models")
def test_components_that_are_dropped_and_replaced(installed, theirs):
    embeds, negative = installed.encode_prompt("a red circle moving left", device="cuda", max_sequence_length=24)
    given = call(prompt=None, prompt_embeds=embeds, negative_prompt_embeds=negative)
    encoder, vae = installed.text_encoder, installed.vae
    assert relative(installed(**call()).frames, theirs) < FP32
    compiled = programs(vae)
    try:
        installed.text_encoder = None
        assert on_chips(encoder) == [False] and "text_encoder" not in tpu.report(installed)["components"]
        assert relative(installed(**given).frames, theirs) < FP32
        installed.register_modules(vae=tiny.wan(seed=5).vae)
        assert on_chips(vae, installed.vae) == [False, False]
        assert relative(installed(**given).frames, theirs) > 0.01 and on_chips(vae, installed.vae) == [False, True]
    finally:
        installed.text_encoder, installed.vae = encoder, vae
    assert relative(installed(**call()).frames, theirs) < FP32
    assert programs(vae) == compiled  # it came back with its program


@idiom("shared-config")
def test_pipelines_that_share_models_have_one_configuration(plain):
    config = tpu.TPUConfig(mesh=(1, 2, 1), attention="reference", host=("text_encoder",), glue="host")
    parts = copy.deepcopy(plain.components)
    first, second = tpu.install(WanPipeline(**parts), config), WanPipeline(**parts)
    for mesh, changes, words in (
        ((1, 2, 1), {}, "one TPUConfig.*auto.*reference.*without"),
        ((2, 1, 1), {"attention": "reference"}, r"one TPUConfig.*\(2, 1, 1\).*\(1, 2, 1\).*without"),
        ((1, 2, 1), {"attention": "reference"}, "for text_encoder, from another .* the chips"),
    ):
        with pytest.raises(ValueError, match=words):
            tpu.install(second, tpu.TPUConfig(mesh=mesh, **changes))
        assert type(second) is WanPipeline
    tpu.install(second)
    assert second._tpu.config.attention == "reference" and tpu.report(second)["mesh"]["sp"] == 2
    assert second._tpu.glue == "resident" and tpu.report(second)["on_host"] == ["text_encoder"]
    with pytest.raises(ValueError, match="one TPUConfig"):
        tpu.install(first, tpu.TPUConfig(mesh=(1, 1, 1)))
    assert first._tpu.config == dataclasses.replace(config, regroup=False)
    tpu.uninstall(second)
    assert tpu.install(first, tpu.TPUConfig(mesh=(1, 1, 1)))._tpu.config.mesh == (1, 1, 1)


@idiom("from-pipe", "from-pipe-more", "controlnet-list")
def test_a_pipeline_made_of_an_installed_one_with_a_list_of_controlnets_more(pair):
    theirs, ours = pair
    torch.manual_seed(7)
    nets, images = [tiny.with_last_layers(tiny.controlnet(seed=n)) for n in range(2)], [tiny.picture(32, 32)] * 2

    def made_of(pipe, nets):
        made = StableDiffusionControlNetPipeline.from_pipe(pipe, controlnet=nets)
        made.set_progress_bar_config(disable=True)
        return made

    given = {"image": images, "controlnet_conditioning_scale": [0.7, 0.3]}
    expected = pictures(made_of(theirs, copy.deepcopy(nets)), **given)
    assert relative(pictures(theirs), expected) > 1e-4
    pipe = made_of(ours, nets).to("cuda")
    assert relative(pictures(pipe, **given), expected) < FP32
    assert pipe._tpu.runners["unet"] is ours._tpu.runners["unet"]
    scales = [random.random() for _ in nets]
    other = {**given, "controlnet_conditioning_scale": scales, "control_guidance_end": [0.5, 1.0]}
    assert relative(pictures(pipe, **other), pictures(made_of(theirs, copy.deepcopy(nets)), **other)) < FP32
    assert programs(pipe.controlnet) == 1 and on_chips(pipe.controlnet) == [True]
    controlnet = pipe.controlnet
    del pipe
    assert on_chips(controlnet, ours.unet) == [False, True]


@idiom("ip-adapter")
def test_an_ip_adapter_loaded_into_an_installed_pipeline(pair):
    theirs, ours = pair
    adapter, encoder, image = tiny.ip_adapter(ours.unet), tiny.clip_vision_projected(), tiny.picture(32, 32)
    before = pictures(ours)
    try:
        for pipe in pair:
            pipe.register_modules(image_encoder=copy.deepcopy(encoder), feature_extractor=tiny.clip_images())
            pipe.load_ip_adapter(copy.deepcopy(adapter), subfolder="", weight_name="", image_encoder_folder=None)
        counted = []
        for scale in (0.8, random.uniform(0.1, 0.9), {"up": 0.9}, {"up": random.uniform(0.5, 0.8)}, 0.0):
            for pipe in pair:
                pipe.set_ip_adapter_scale(scale)
            expected, found = (pictures(pipe, ip_adapter_image=image) for pipe in pair)
            assert scale == 0 or relative(before, expected) > 1e-3
            assert relative(found, expected) < FP32
            counted.append(programs(ours.unet))
        assert np.diff(counted).tolist() == [0, 1, 0, 1]  # a program for which scales are zero, none for their values
    finally:
        theirs.unload_ip_adapter(), ours.unload_ip_adapter()
    assert relative(pictures(ours), before) < FP32


@idiom("del-pipe")
def test_a_pipeline_that_is_deleted_leaves_the_chips(plain, new_garbage):
    pipe = WanPipeline(**copy.deepcopy(plain.components)).to("cuda")
    vae, runners = pipe.vae, dict(pipe._tpu.runners)
    assert all(on_chips(pipe.transformer, vae))
    del pipe
    assert not any(runner._placed.arrays for runner in runners.values())
    assert torch.isfinite(vae.decode(torch.randn(1, 16, 1, 4, 6)).sample).all() and on_chips(vae) == [True]
    transformer = weakref.ref(runners.pop("transformer").module)
    gc.collect()
    assert transformer() is None
