"""Copies of pipelines, callbacks and modular pipelines. Oracle: the same lines with the path off, same weights and seeds."""
# ruff: noqa: F811

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import tiny
from conftest import relative
from diffusers import ClassifierFreeGuidance, ComponentsManager, ModularPipeline, WanPipeline, tpu
from diffusers.callbacks import SDXLCFGCutoffCallback
from diffusers.modular_pipelines import StableDiffusionXLAutoBlocks, WanBlocks
from diffusers.tpu.pipelines import attach
from test_idioms_pipelines import FP32, call, idiom, installed, on_chips, plain, theirs, wan  # noqa: F401


pytestmark = pytest.mark.usefixtures("idioms")


@idiom("copies", "copies-of-models", "save-pretrained")
def test_copies_and_pickles_of_a_used_pipeline_and_its_models(installed, theirs, tmp_path):
    assert relative(installed(**call()).frames, theirs) < FP32
    twin = copy.deepcopy(installed)
    assert type(twin).__name__ == "WanPipeline" and twin._tpu.runners["vae"] is not installed._tpu.runners["vae"]
    assert twin.transformer is not installed.transformer
    twin.vae.decoder.conv_out.bias.data += 0.25
    assert 1e-3 < relative(twin(**call()).frames, theirs)
    loaded = pickle.loads(pickle.dumps(installed))
    assert type(loaded) is WanPipeline and [attach.runs(m) for m in (loaded.vae, loaded.text_encoder)] == [None, None]
    assert relative(loaded(**call()).frames, theirs) == 0
    vae, file, latents = installed.vae, io.BytesIO(), torch.randn(1, 16, 1, 4, 6)
    torch.save(vae, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not {"decode", "forward", "_tpu_runner", "_hf_hook", "__getstate__"} & vars(loaded).keys()
    assert relative(vae.decode(latents).sample, loaded.decode(latents).sample) < FP32
    installed.transformer.save_pretrained(tmp_path)
    again, state = type(installed.transformer).from_pretrained(tmp_path), installed.transformer.state_dict()
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    assert relative(installed(**call()).frames, theirs) < FP32  # it is as it was


# Callbacks


def both(ours, plain, **given):
    """The first thing that each pipeline returns, from one seed and one global seed."""
    answers = []
    for pipe in (ours, plain):
        torch.manual_seed(5)
        answers.append(pipe(**{**given, "generator": tiny.fresh()})[0])
    return answers


@idiom("callback-values", "scheduler-after")
def test_callbacks_see_tensors_of_the_host(installed, plain):
    seen = []

    def look(pipe, step, timestep, tensors):
        latents = tensors["latents"]
        noise, line = torch.randn_like(latents), f"{latents.mean():.3f} {int(timestep)} {step}"
        seen.append((line, latents, noise, latents.numpy().copy()))
        return {"latents": latents + 0.1 * noise} if step == 1 else tensors

    ours, upstreams = both(installed, plain, **call(callback_on_step_end=look))
    assert relative(ours, upstreams) < FP32
    half = len(seen) // 2
    assert half == 3
    for (line, latents, noise, values), (other, their_latents, their_noise, _) in zip(seen[:half], seen[half:]):
        assert line == other and type(latents) is torch.Tensor
        assert torch.equal(noise, their_noise) and relative(latents, their_latents) < FP32
        assert torch.equal(latents, torch.from_numpy(values)) and torch.isfinite(latents.std())  # after the call too
    scheduler = installed.scheduler
    assert type(scheduler.timesteps) is torch.Tensor and f"{scheduler.timesteps[0].item():.1f}"
    assert all(type(x) is torch.Tensor for x in scheduler.model_outputs if x is not None)


class Weaker(type(SDXLCFGCutoffCallback())):
    tensor_inputs = ["latents"]

    def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
        callback_kwargs["latents"] = callback_kwargs["latents"] * 0.9
        return callback_kwargs


@idiom("callback-writes", "callback-objects", "callback-host-glue")
@pytest.mark.parametrize(
    "way", ["in place", "numpy", "a text", "a weight", "replaced", "interrupt", "object", "on the host"]
)
def test_what_a_callback_writes_is_seen(wan, plain, way):
    def write(pipe, step, timestep, tensors):
        latents = tensors["latents"]
        if way == "in place":
            latents[:, :2].mul_(0.5)
            return {}
        if way == "numpy":
            latents.numpy()[:, 1] += 0.25
        if way == "a text":
            text[0].numpy()[:] += 1 - step  # there and back
        if way in ("a weight", "on the host") and step != 1:  # as fuse_lora() and unfuse_lora() write
            pipe.transformer.proj_out.weight.data.mul_(0.5 if step == 0 else 2)
        if way == "on the host":
            return {"latents": latents + 0.05 * torch.randn_like(latents)}
        if way == "interrupt":
            pipe._interrupt = step == 1
        return {"latents": torch.zeros_like(latents)} if way == "replaced" and step == 0 else tensors

    tpu.uninstall(wan)
    tpu.install(wan, tpu.TPUConfig(glue="host" if way == "on the host" else "auto"))
    given = call(callback_on_step_end=Weaker() if way == "object" else write, output_type="latent", return_dict=False)
    text = plain.encode_prompt(given["prompt"])
    if way == "a text":
        given |= {"prompt": None, "prompt_embeds": text[0], "negative_prompt_embeds": text[1]}
    ours, upstreams = both(wan, plain, **given)
    assert type(ours) is torch.Tensor and relative(ours, upstreams) < FP32
    tpu.uninstall(wan)


@idiom("to-cpu", "offload")
def test_leaving_the_tpu_and_offloading_are_said_once(plain, said):
    for _ in range(2):
        plain.to("cuda").to("cpu")
    (message,) = said
    assert "left the TPU path" in message
    with pytest.raises(ValueError, match="'xpu'"):
        plain.to("cuda").to("xpu")
    for _ in range(2):
        plain.enable_model_cpu_offload()
        plain.enable_sequential_cpu_offload()
    assert len(said) == 3 and "enable_model_cpu_offload" in said[1] and "wait on the host" in said[2]
    tpu.uninstall(plain)


# Modular pipelines


@idiom("modular")
def test_a_modular_pipeline_runs_on_the_tpu_without_being_moved(monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU_MESH", "1,1,1")
    given = {name: value for name, value in call().items() if name != "guidance_scale"}
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    upstreams = tiny.modular(WanBlocks, "wan", 4.0)
    expected = np.asarray(upstreams(**given, output="videos"))
    monkeypatch.setenv("DIFFUSERS_TPU", "cpu")
    pipe = tiny.modular(WanBlocks, "wan", 4.0)
    assert type(pipe).__name__ == type(upstreams).__name__ and isinstance(pipe, type(upstreams))
    given["generator"] = call()["generator"]
    assert relative(pipe(**given, output="videos"), expected) < FP32
    assert {*tpu.report(pipe)["components"]} == {"text_encoder", "transformer", "vae"}
    assert pipe.to("cuda") is pipe and on_chips(pipe.transformer, pipe.vae) == [True, True]
    assert pipe.to("cpu") is pipe and type(pipe) is type(upstreams) and attach.runs(pipe.transformer) is None
    assert "_tpu" in vars(upstreams.to("cuda"))


@idiom("modular-load")
def test_a_modular_pipeline_loaded_and_managed(said, tmp_path, monkeypatch, new_garbage):
    monkeypatch.setenv("DIFFUSERS_TPU_MESH", "1,1,1")
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    expected = tiny.sdxl()(**tiny.arguments("sdxl")).images
    tiny.modular(StableDiffusionXLAutoBlocks, "sdxl", 5.0).save_pretrained(str(tmp_path), overwrite_modular_index=True)
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
    assert relative(pipe(**tiny.arguments("sdxl"), output="images"), expected) < FP32
    unet = attach.runs(pipe.unet)
    assert unet._placed.arrays
    pipe.unload_components("unet")
    assert not unet._placed.arrays and pipe.unet is None
    manager.disable_auto_cpu_offload()
