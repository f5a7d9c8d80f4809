"""Idioms of scripts around models and pipelines. Oracle: the same lines with the path off, same weights and seeds."""

import copy
import gc
import io
import logging
import pickle
import weakref

import numpy as np
import pytest
import torch

import tiny
import tiny_images
from conftest import relative
from diffusers import (
    AutoencoderKLWan,
    AutoencoderTiny,
    ClassifierFreeGuidance,
    ComponentsManager,
    ModularPipeline,
    StableDiffusionXLControlNetPipeline,
    WanPipeline,
    WanVideoToVideoPipeline,
    tpu,
)
from diffusers.callbacks import SDXLCFGCutoffCallback
from diffusers.tpu import idioms, notices
from diffusers.tpu.pipelines import attach
from tiny_wan import picture


idiom = pytest.mark.idiom
SMALL = {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}  # of AutoencoderTiny
FP32 = 1e-5  # measured: 3e-7 to 1.2e-6


@pytest.fixture(autouse=True)
def on_the_path(chips):
    """The TPU path as a process has it that is imported with it on."""
    tpu.activate()
    yield
    idioms.off()


@pytest.fixture
def said(monkeypatch) -> list:
    """Sentences about idioms that have no meaning, as if nothing had been said."""
    sentences, keys = [], {}
    monkeypatch.setattr(notices, "_said", keys)
    logger = logging.getLogger("diffusers.tpu.notices")
    monkeypatch.setattr(logger, "warning", sentences.append)
    return sentences


@pytest.fixture(scope="module")
def plain():
    """A tiny Wan that never meets the TPU path."""
    pipe = tiny.wan()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def theirs(plain):
    """What upstream makes of the call."""
    return np.asarray(plain(**call()).frames)


@pytest.fixture(scope="module")
def wan(plain):
    """Its twin, which each test finds installed or not, and leaves as it was built."""
    yield (pipe := WanPipeline(**{name: copy.deepcopy(part) for name, part in plain.components.items()}))
    tpu.uninstall(pipe)


@pytest.fixture
def installed(wan):
    wan.set_progress_bar_config(disable=True)
    return tpu.install(wan)


@pytest.fixture(scope="module")
def sdxl():
    """A tiny SDXL that never meets the TPU path."""
    return tiny_images.sdxl()


@pytest.fixture(scope="module")
def pictures(sdxl):
    """What upstream makes of a small call of it."""
    return sdxl(**tiny_images.arguments()).images


@pytest.fixture
def one_chip(monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU_MESH", "1,1,1")


@pytest.fixture(scope="module")
def sdxl_twin(sdxl):
    return copy.deepcopy(sdxl)


@pytest.fixture
def sdxl_installed(sdxl_twin, one_chip):
    return tpu.install(sdxl_twin)


def call(**changes):
    """Arguments of a picture: its programs are small."""
    return {**tiny.arguments("wan"), "num_frames": 1, **changes}


def on_chips(*modules) -> list[bool]:
    return [bool(r and tpu.report(m)["on_chips"]) for m in modules for r in [attach.runs(m)]]


def programs(module) -> int:
    """Compiled here, or found in the store."""
    return len(tpu.report(module)["programs"])


# Models by themselves


@idiom("model-to-cuda")
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


@idiom("model-to-cuda", "swapped-models")
def test_models_made_by_hand_or_copied_are_moved_and_put_into_a_pipeline(sdxl, sdxl_installed):
    given = torch.randn(2, 4, 8, 8), torch.tensor(500), torch.randn(2, 7, sdxl.unet.config.cross_attention_dim)
    added = {"text_embeds": torch.randn(2, sdxl.text_encoder_2.config.projection_dim), "time_ids": torch.randn(2, 6)}
    unet = copy.deepcopy(sdxl_installed.unet).to("cuda")
    with torch.no_grad():
        expected = sdxl.unet(*given, added_cond_kwargs=added).sample
    assert on_chips(unet) == [True] and relative(unet(*given, added_cond_kwargs=added).sample, expected) < FP32
    vae, z = tiny_images.vae(), torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        expected = vae.decode(z).sample
    for move in (lambda: vae.cuda(), lambda: vae.cpu().to("cuda")):
        assert on_chips(move()) == [True] and relative(vae.decode(z).sample, expected) < FP32
    small, before = AutoencoderTiny(**SMALL).eval(), (sdxl.vae, sdxl_installed.vae)
    sdxl.vae, sdxl_installed.vae = copy.deepcopy(small), small.to("cuda")
    assert on_chips(small) == [True]
    ours, theirs = (pipe(**tiny_images.arguments()).images for pipe in (sdxl_installed, sdxl))
    assert relative(ours, theirs) < FP32 and programs(small)
    sdxl.vae, sdxl_installed.vae = before


@idiom("layerwise-casting", "group-offload-model")
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@torch.no_grad()
def test_a_vae_whose_layers_are_cast_and_offloaded(plain, kind):
    ours, theirs, video = copy.deepcopy(plain.vae), copy.deepcopy(plain.vae), torch.randn(1, 3, 5, 32, 32)
    ours.enable_group_offload("cuda", offload_type=kind, num_blocks_per_group=1, use_stream=True)
    for vae in (ours, theirs):
        vae.enable_layerwise_casting(torch.float16, torch.float32)
    for _ in range(2):
        assert relative(ours(video).sample, theirs(video).sample) < FP32
    assert not [one for one in tpu.report(ours)["rungs"] if one["rung"] == "host"]


@idiom("model-install")
def test_a_model_is_installed_with_a_configuration_reported_and_given_back(plain):
    vae, latents = copy.deepcopy(plain.vae), torch.randn(1, 16, 1, 4, 6)
    with pytest.raises(ValueError, match=r"install\(model\)"):
        tpu.report(vae)
    assert tpu.install(vae, tpu.TPUConfig(mesh=(1, 2, 1))) is vae
    assert tpu.report(vae)["mesh"] == {"dp": 1, "sp": 2, "tp": 1} and on_chips(vae) == [False]
    assert tpu.install(vae) is vae and tpu.install(vae, tpu.TPUConfig(mesh=(1, 2, 1), glue="host")) is vae
    tpu.install(vae, tpu.TPUConfig(mesh=(1, 1, 1)))
    assert tpu.report(vae)["mesh"]["sp"] == 1
    with pytest.raises(ValueError, match="TPUConfig.host for a pipeline"):
        tpu.install(vae, tpu.TPUConfig(host=("vae",)))
    assert tpu.uninstall(vae) is vae and tpu.uninstall(vae) is vae and attach.runs(vae) is None
    assert torch.isfinite(vae.decode(latents).sample).all()


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


@idiom("text-encoder-to-cuda")
def test_a_text_encoder_of_transformers(plain):
    encoder, ids = copy.deepcopy(plain.text_encoder), torch.randint(3, 7, (2, 9))
    expected = encoder(ids).last_hidden_state.detach()
    assert encoder.to("cuda", torch.float32) is encoder and on_chips(encoder) == [True]
    assert relative(encoder(ids.to(encoder.device)).last_hidden_state, expected) < FP32
    encoder.to(torch.bfloat16)  # after use: converted, and compiled for it
    ours = encoder(ids).last_hidden_state
    assert ours.dtype == torch.bfloat16 and relative(ours.float(), expected) < 0.02 and programs(encoder) == 2
    assert encoder.cpu() is encoder and attach.runs(encoder) is None


@idiom("model-device-map")
def test_a_models_own_device_map(plain, tmp_path):
    for name, asked in (("vae", "cuda"), ("text_encoder", {"": 0})):
        module = getattr(plain, name)
        module.save_pretrained(tmp_path / name)
        loaded = type(module).from_pretrained(tmp_path / name, device_map=asked)
        assert attach.runs(loaded) is not None and loaded.device.type == "cuda"
        assert attach.runs(type(module).from_pretrained(tmp_path / name, device_map="cpu")) is None
        with pytest.raises(NotImplementedError, match="sharded over all chips"):
            type(module).from_pretrained(tmp_path / name, device_map={"encoder": "cuda", "decoder": "cpu"})
    model, info = AutoencoderKLWan.from_pretrained(tmp_path / "vae", device_map="auto", output_loading_info=True)
    assert info["missing_keys"] == [] and attach.runs(model) is not None


@idiom("other-modules")
def test_other_modules_stay_on_the_host_and_it_is_said(plain, said):
    class Upscaler(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

    upscaler, x = Upscaler(), torch.randn(2, 3)
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


@idiom("model-into-pipeline")
def test_a_model_moved_by_itself_is_adopted_by_a_pipeline(plain, theirs, tmp_path):
    parts = {name: copy.deepcopy(part) for name, part in plain.components.items()}
    vae, transformer = parts["vae"].to("cuda"), tpu.install(parts["transformer"], tpu.TPUConfig(mesh=(2, 4, 1)))
    own = attach.runs(transformer)
    pipe = WanPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.to("cuda") is pipe and pipe.vae is vae
    assert attach.runs(transformer) is own and attach.runs(vae).mesh == own.mesh  # kept; attached anew
    assert relative(pipe(**call()).frames, theirs) < FP32
    pipe.save_pretrained(tmp_path / "wan")
    again = WanPipeline.from_pretrained(tmp_path / "wan", vae=vae)
    assert again.vae is vae and attach.runs(vae) is pipe._tpu.runners["vae"] is again._tpu.runners["vae"]


@idiom("component-moves")
def test_components_that_are_moved(installed, theirs):
    installed.to("cuda")
    transformer, encoder = installed.transformer, installed.text_encoder
    assert (
        transformer.to("cuda") is transformer and transformer.cuda() is transformer and on_chips(transformer) == [True]
    )
    encoder.to("cpu")  # as scripts do when the prompt is encoded
    assert on_chips(encoder, transformer) == [False, True]
    assert relative(installed(**call()).frames, theirs) < FP32 and on_chips(encoder) == [True]
    installed.vae.to(torch.float32), installed.vae.to("cuda", torch.float32)
    with pytest.raises(ValueError, match="belongs to an installed WanPipeline"):
        tpu.uninstall(installed.vae)
    with pytest.raises(ValueError, match="belongs to an installed WanPipeline"):
        tpu.install(installed.vae, tpu.TPUConfig(mesh=(1, 1, 1)))
    before = programs(transformer)
    assert relative(installed(**call()).frames, theirs) < FP32 and programs(transformer) == before


@idiom("device-asked")
def test_the_device_that_a_script_asked_for(plain, theirs):
    def devices():
        return [one.device.type for one in (pipe, *(pipe.text_encoder, pipe.transformer, pipe.vae))]

    seen = []

    def callback(pipe, step, timestep, values):
        seen.append((*devices(), pipe._execution_device.type))
        return values

    pipe = WanPipeline(**copy.deepcopy(plain.components))
    pipe.transformer.to("cuda")  # by itself, as scripts leave the text encoder on the host
    assert devices() == ["cuda", "cpu", "cuda", "cpu"]
    pipe.to("cuda")
    assert devices() == ["cuda"] * 4 and torch.device("cuda:0") == pipe.device == pipe.transformer.device
    pipe.text_encoder.to("cpu")
    assert devices() == ["cuda", "cpu", "cuda", "cuda"]
    pipe.text_encoder.to(pipe.device)
    assert relative(pipe(**call(callback_on_step_end=callback)).frames, theirs) < FP32
    assert set(seen) == {("cuda",) * 5} and devices() == ["cuda"] * 4
    pipe.to("cpu")
    assert devices() == ["cpu"] * 4
    tpu.install(pipe, tpu.TPUConfig(host=("vae",)))
    assert devices() == ["cuda", "cuda", "cuda", "cpu"]


@idiom("component-none")
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
        assert on_chips(vae) == [False]
        assert relative(installed(**given).frames, theirs) > 0.01
    finally:
        installed.text_encoder, installed.vae = encoder, vae
    assert relative(installed(**call()).frames, theirs) < FP32
    assert programs(vae) == compiled  # it came back with its program


@idiom("swapped-models")
def test_of_three_swapped_models_one_is_on_the_chips(installed):
    own = installed.transformer
    three = [own, *(tiny.wan(seed=seed).transformer for seed in (3, 4))]
    try:
        compiled = []
        for transformer in (*three, own):
            installed.transformer = transformer
            installed(**call(num_frames=1, output_type="latent", num_inference_steps=1))
            assert on_chips(*three) == [t is transformer for t in three]
            compiled.append(programs(transformer))
        assert compiled[0] == compiled[-1]
    finally:
        installed.transformer = own


@idiom("shared-config")
def test_pipelines_that_share_models_have_one_configuration(plain):
    config = tpu.TPUConfig(mesh=(1, 2, 1), attention="reference", host=("text_encoder",), glue="host")
    parts = {name: copy.deepcopy(part) for name, part in plain.components.items()}
    first, second = tpu.install(WanPipeline(**parts), config), WanPipeline(**parts)
    for other in (tpu.TPUConfig(mesh=(1, 2, 1)), tpu.TPUConfig(mesh=(1, 4, 1), attention="reference")):
        with pytest.raises(ValueError, match=r"one TPUConfig.*(auto.*reference|\(1, 4, 1\).*\(1, 2, 1\)).*without"):
            tpu.install(second, other)
    assert type(second) is WanPipeline
    with pytest.raises(ValueError, match="for text_encoder, from another .* the chips"):
        tpu.install(second, tpu.TPUConfig(mesh=(1, 2, 1), attention="reference"))
    tpu.install(second)
    assert second._tpu.config.attention == "reference" and tpu.report(second)["mesh"]["sp"] == 2
    assert second._tpu.glue == "resident" and [*second._tpu.on_host] == ["text_encoder"]
    with pytest.raises(ValueError, match="one TPUConfig"):
        tpu.install(first, tpu.TPUConfig(mesh=(1, 1, 1)))
    assert first._tpu.config == config
    tpu.uninstall(second)
    assert tpu.install(first, tpu.TPUConfig(mesh=(1, 1, 1)))._tpu.config.mesh == (1, 1, 1)


@idiom("from-pipe-more")
@idiom("controlnet-list")
def test_a_pipeline_made_of_an_installed_one_with_a_list_of_controlnets_more(sdxl, sdxl_installed, pictures):
    torch.manual_seed(7)
    nets, images = [tiny_images.controlnet() for _ in range(2)], [picture(32, 32) for _ in range(2)]

    def made_of(pipe, nets):
        made = StableDiffusionXLControlNetPipeline.from_pipe(pipe, controlnet=nets)
        made.set_progress_bar_config(disable=True)
        return made

    given = {"image": images, "controlnet_conditioning_scale": [0.7, 0.3]}
    expected = made_of(sdxl, copy.deepcopy(nets))(**tiny_images.arguments(**given)).images
    assert relative(pictures, expected) > 1e-4
    pipe = made_of(sdxl_installed, nets).to("cuda")
    assert relative(pipe(**tiny_images.arguments(**given)).images, expected) < FP32
    assert pipe._tpu.runners["unet"] is sdxl_installed._tpu.runners["unet"]
    assert programs(pipe.controlnet) == 1 and on_chips(pipe.controlnet) == [True]
    controlnet = pipe.controlnet
    del pipe
    assert on_chips(controlnet, sdxl_installed.unet) == [False, True]


@idiom("ip-adapter")
def test_an_ip_adapter_loaded_into_an_installed_pipeline(sdxl, sdxl_installed):
    adapter, image = tiny_images.ip_adapter(sdxl.unet), picture(32, 32)

    def frames(pipe, scale):
        if pipe.unet.encoder_hid_proj is None:
            pipe.register_modules(
                image_encoder=copy.deepcopy(encoder), feature_extractor=tiny_images.image_processor()
            )
            pipe.load_ip_adapter(copy.deepcopy(adapter), subfolder="", weight_name="", image_encoder_folder=None)
        pipe.set_ip_adapter_scale(scale)
        return pipe(**tiny_images.arguments(ip_adapter_image=image)).images

    encoder, before = tiny_images.image_encoder(), sdxl_installed(**tiny_images.arguments()).images
    theirs = copy.deepcopy(sdxl)
    try:
        for scale in (0.8, 0.3):
            expected = frames(theirs, scale)
            assert relative(before, expected) > 1e-3
            assert relative(frames(sdxl_installed, scale), expected) < FP32
    finally:
        sdxl_installed.unload_ip_adapter()
    assert relative(sdxl_installed(**tiny_images.arguments()).images, before) < FP32


@idiom("from-pipe")
def test_a_pipeline_of_another_kind_from_an_installed_one(installed, plain):
    def frames(pipe):
        other = WanVideoToVideoPipeline.from_pipe(pipe)
        other.set_progress_bar_config(disable=True)
        given = {**call(video=[image], strength=0.7), "num_frames": None}
        given.pop("num_frames")
        return (other.to("cuda") if pipe is installed else other)(**given).frames

    image = picture(32, 48)
    assert relative(frames(installed), frames(plain)) < FP32


@idiom("del-pipe")
def test_a_pipeline_that_is_deleted_leaves_the_chips(plain):
    pipe = WanPipeline(**{name: copy.deepcopy(part) for name, part in plain.components.items()}).to("cuda")
    vae, runners = pipe.vae, dict(pipe._tpu.runners)
    assert all(on_chips(pipe.transformer, vae))
    del pipe
    assert not any(runner._placed.arrays for runner in runners.values())
    assert torch.isfinite(vae.decode(torch.randn(1, 16, 1, 4, 6)).sample).all() and on_chips(vae) == [True]
    transformer = weakref.ref(runners.pop("transformer").module)
    gc.collect()
    assert transformer() is None


# Modular pipelines


@idiom("modular")
def test_a_modular_pipeline_runs_on_the_tpu_without_being_moved(monkeypatch, one_chip):
    given = {name: value for name, value in call().items() if name != "guidance_scale"}
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    upstreams = tiny_images.modular_wan()
    upstreams.set_progress_bar_config(disable=True)
    expected = np.asarray(upstreams(**given, output="videos"))
    monkeypatch.setenv("DIFFUSERS_TPU", "cpu")
    pipe = tiny_images.modular_wan()
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe).__name__ == type(upstreams).__name__ and isinstance(pipe, type(upstreams))
    given["generator"] = call()["generator"]
    assert relative(pipe(**given, output="videos"), expected) < FP32
    assert {*tpu.report(pipe)["components"]} == {"text_encoder", "transformer", "vae"}
    assert pipe.to("cuda") is pipe and on_chips(pipe.transformer, pipe.vae) == [True, True]
    assert pipe.to("cpu") is pipe and type(pipe) is type(upstreams) and attach.runs(pipe.transformer) is None
    assert "_tpu" in vars(upstreams.to("cuda"))


@idiom("modular-load")
def test_a_modular_pipeline_loaded_and_managed(pictures, said, tmp_path, monkeypatch, one_chip):
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    tiny_images.modular_sdxl().save_pretrained(str(tmp_path), overwrite_modular_index=True)
    monkeypatch.setenv("DIFFUSERS_TPU", "cpu")
    manager = ComponentsManager()
    for _ in range(2):
        manager.enable_auto_cpu_offload(device="cuda")
    pipe = ModularPipeline.from_pretrained(str(tmp_path), components_manager=manager, collection="sdxl")
    pipe.load_components(dtype=torch.float32)
    pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=5.0))  # as the pipeline's own default
    pipe.set_progress_bar_config(disable=True)
    (message,) = said
    assert "enable_auto_cpu_offload" in message and "wait on the host" in message
    assert relative(pipe(**tiny_images.arguments(), output="images"), pictures) < FP32
    unet = attach.runs(pipe.unet)
    assert unet._placed.arrays
    pipe.unload_components("unet")
    assert not unet._placed.arrays and pipe.unet is None
    manager.disable_auto_cpu_offload()


# Copies


@idiom("copies")
def test_copies_and_pickles_of_a_used_pipeline(installed, theirs):
    installed(**call())
    twin = copy.deepcopy(installed)
    assert type(twin).__name__ == "WanPipeline" and twin._tpu.runners["vae"] is not installed._tpu.runners["vae"]
    assert twin.transformer is not installed.transformer
    assert relative(twin(**call()).frames, theirs) < FP32
    loaded = pickle.loads(pickle.dumps(installed))
    assert type(loaded) is WanPipeline and [attach.runs(m) for m in (loaded.vae, loaded.text_encoder)] == [None, None]
    assert relative(loaded(**call()).frames, theirs) == 0
    assert relative(loaded.to("cuda")(**call()).frames, theirs) < FP32
    assert relative(installed(**call()).frames, theirs) < FP32  # it is as it was


@idiom("copies-of-models")
def test_copies_and_pickles_of_a_used_model(installed):
    installed(**call())
    vae, file = installed.vae, io.BytesIO()
    latents = torch.randn(1, 16, 1, 4, 6)
    ours = vae.decode(latents).sample
    torch.save(vae, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not {"decode", "forward", "_tpu_runner", "_hf_hook", "__getstate__"} & vars(loaded).keys()
    assert relative(ours, loaded.decode(latents).sample) < FP32
    twin = copy.deepcopy(vae)
    assert attach.runs(twin) not in (None, attach.runs(vae))
    twin.decoder.conv_out.bias.data += 0.25
    assert relative(twin.decode(latents).sample.clamp(-9, 9), loaded.decode(latents).sample + 0.25) < 0.2
    assert torch.equal(vae.decode(latents).sample, ours)


@idiom("save-pretrained")
def test_an_installed_model_is_saved_as_upstreams(installed, tmp_path):
    installed.transformer.save_pretrained(tmp_path)
    state = installed.transformer.state_dict()
    again = type(installed.transformer).from_pretrained(tmp_path)
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())


# Callbacks


def both(ours, plain, **given):
    """The first thing that each pipeline returns, from one seed and one global seed."""
    answers = []
    for pipe in (ours, plain):
        torch.manual_seed(5)
        answers.append(pipe(**{**given, "generator": torch.Generator().manual_seed(11)})[0])
    return answers


@idiom("callback-values")
def test_callbacks_see_tensors_of_the_host(installed, plain):
    seen = []

    def look(pipe, step, timestep, tensors):
        latents = tensors["latents"]
        noise = torch.randn_like(latents)
        seen.append(
            (f"{latents.mean():.3f} {int(timestep)} {step} {pipe.device}", latents, noise, latents.numpy().copy())
        )
        return {"latents": latents + 0.1 * noise} if step == 1 else tensors

    ours, upstreams = both(installed, plain, **call(callback_on_step_end=look))
    assert relative(ours, upstreams) < FP32
    half = len(seen) // 2
    assert half == 3
    for (line, latents, noise, values), (other, their_latents, their_noise, _) in zip(seen[:half], seen[half:]):
        assert line.split()[:3] == other.split()[:3] and type(latents) is torch.Tensor
        assert torch.equal(noise, their_noise) and relative(latents, their_latents) < FP32
        assert torch.equal(latents, torch.from_numpy(values)) and torch.isfinite(latents.std())  # after the call too


@idiom("callback-writes")
@pytest.mark.parametrize("way", ["in place", "numpy", "replaced", "interrupt"])
def test_what_a_callback_writes_is_seen(installed, plain, way):
    def write(pipe, step, timestep, tensors):
        latents = tensors["latents"]
        if way == "in place":
            latents[:, :2].mul_(0.5)
            return {}
        if way == "numpy":
            latents.numpy()[:, 1] += 0.25
        if way == "interrupt":
            pipe._interrupt = step == 1
        return {"latents": torch.zeros_like(latents)} if way == "replaced" and step == 0 else tensors

    given = call(callback_on_step_end=write, output_type="latent", return_dict=False)
    ours, upstreams = both(installed, plain, **given)
    assert type(ours) is torch.Tensor and relative(ours, upstreams) < FP32


@idiom("callback-objects")
def test_upstreams_callback_objects(installed, plain):
    class Weaker(type(SDXLCFGCutoffCallback())):
        tensor_inputs = ["latents"]

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            callback_kwargs["latents"] = callback_kwargs["latents"] * 0.9
            return callback_kwargs

    ours, upstreams = both(installed, plain, **call(callback_on_step_end=Weaker(), output_type="latent"))
    assert relative(ours, upstreams) < FP32


@idiom("callback-host-glue")
@pytest.mark.filterwarnings("ignore:.*callback.* is deprecated:FutureWarning")
def test_callbacks_of_a_pipeline_whose_glue_is_on_the_host(sdxl, sdxl_installed):
    seen = []

    def look(pipe, step, timestep, tensors):
        seen.append((f"{tensors['latents'].std():.2f}", torch.randn_like(tensors["latents"])))
        return {"latents": tensors["latents"] + 0.05 * seen[-1][1]}

    def legacy(step, timestep, latents):
        seen.append((f"{latents.std():.2f}", latents))

    given = tiny_images.arguments(callback_on_step_end=look, callback=legacy, callback_steps=1)
    ours, upstreams = both(sdxl_installed, sdxl, **given)
    assert relative(ours, upstreams) < FP32 and len(seen) == 8 and [s for s, _ in seen[:4]] == [s for s, _ in seen[4:]]


@idiom("scheduler-after")
def test_what_a_scheduler_keeps_is_on_the_host_after_the_call(installed):
    installed(**call())
    scheduler = installed.scheduler
    assert type(scheduler.timesteps) is torch.Tensor and f"{scheduler.timesteps[0].item():.1f}"
    assert all(type(x) is torch.Tensor for x in scheduler.model_outputs if x is not None)


# What is said


@idiom("to-cpu")
def test_leaving_the_tpu_is_said_once(plain, said):
    for _ in range(2):
        plain.to("cuda").to("cpu")
    (message,) = said
    assert "left the TPU path" in message
    with pytest.raises(ValueError, match="'xpu'"):
        plain.to("cuda").to("xpu")
    tpu.uninstall(plain)


@idiom("offload")
def test_offloading_is_said_once(plain, said):
    for _ in range(2):
        plain.enable_model_cpu_offload()
        plain.enable_sequential_cpu_offload()
    assert len(said) == 2 and "enable_model_cpu_offload" in said[0] and "wait on the host" in said[1]
    tpu.uninstall(plain)


@idiom("nothing-touched")
def test_switched_off_the_methods_are_torchs_own():
    from transformers import PreTrainedModel

    idioms.off()
    owners = {torch.nn.Module: ("to", "cuda", "cpu"), PreTrainedModel: ("from_pretrained",)}
    for owner, names in owners.items():
        for name in names:
            method = vars(owner)[name]
            assert getattr(method, "__func__", method).__code__.co_filename.find("diffusers") < 0
