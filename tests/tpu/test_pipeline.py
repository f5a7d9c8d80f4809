"""Oracle: the same pipeline without the TPU path, in the same process, with the same weights and generator."""

import copy
import importlib

import numpy as np
import pytest
import torch

import tiny
from conftest import relative
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, WanPipeline, tpu


@pytest.fixture(scope="module")
def wan():
    """One tiny Wan for the module's tests; each leaves it without the TPU path."""
    return tiny.wan()


@pytest.fixture(scope="module")
def twin():
    """The same for the TPU path: it keeps its programs from test to test."""
    pipe = tiny.wan()
    yield pipe
    tpu.uninstall(pipe)


@pytest.fixture
def installed(chips, twin):
    """The tiny Wan on the TPU path, dp 2 x sp 4; each test leaves it as it was."""
    return tpu.install(twin)


def call(name="wan", **changes):
    return {**tiny.arguments(name), **changes}


@pytest.mark.parametrize(
    "name, mesh",
    [("wan", (1, 1, 1)), ("wan", (1, 3, 1)), *((name, None) for name in tiny.FAMILIES)],
    ids=lambda x: x if isinstance(x, str) else "auto" if x is None else "x".join(map(str, x)),
)
def test_video_equals_upstreams(chips, name, mesh):
    pipe = tiny.make(name)
    given = call(name)
    theirs = np.asarray(pipe(**given).frames)
    tpu.install(pipe, tpu.TPUConfig(mesh=mesh))
    ours = np.asarray(pipe(**{**given, "generator": call(name)["generator"]}).frames)
    assert np.isfinite(theirs).all() and theirs.std() > 0.01
    assert relative(ours, theirs) < 1e-5  # measured: 5e-7
    assert pipe._tpu.glue == "resident"


def test_an_image_of_a_unet_equals_upstreams(chips):
    pipe = tiny.sdxl()
    given = {"guidance_scale": 5.0, "guidance_rescale": 0.7, "output_type": "np"}
    theirs = pipe(**{**tiny.arguments("sdxl"), **given}).images
    tpu.install(pipe)
    ours = pipe(**{**tiny.arguments("sdxl"), **given}).images
    assert theirs.std() > 0.01
    assert relative(ours, theirs) < 1e-5  # measured: 7e-7
    assert pipe._tpu.glue == "resident" and not any(part["eager"] for part in tpu.report(pipe)["components"].values())


def test_one_compilation_for_all_steps_and_none_for_a_second_prompt(installed):
    tpu.uninstall(installed)
    tpu.install(installed)  # without programs
    installed(**call())
    before = {name: len(part["programs"]) for name, part in tpu.report(installed)["components"].items()}
    assert before == {"text_encoder": 1, "transformer": 1, "vae": 1}
    installed(**call(prompt="a red circle", num_inference_steps=5))
    parts = tpu.report(installed)["components"]
    assert {name: len(part["programs"]) for name, part in parts.items()} == before
    (program,) = parts["transformer"]["programs"]
    assert (program["branches"], program["calls"]) == (2, 3 + 5)
    installed(**call(height=48))
    assert len(tpu.report(installed)["components"]["transformer"]["programs"]) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"guidance_scale": 1.0, "output_type": "pt"},
        {"prompt": ["a red circle", "moving left"], "num_videos_per_prompt": 1},
        {"num_videos_per_prompt": 3, "output_type": "latent"},
        {"generator": [torch.Generator().manual_seed(5)]},
    ],
    ids=lambda c: "-".join(c),
)
def test_ways_to_call(installed, wan, changes):
    def given():
        generators = changes.get("generator")
        fresh = {"generator": [torch.Generator().manual_seed(5)]} if generators else {}
        return call(**{**changes, **fresh})

    ours = installed(**given()).frames
    assert relative(ours, wan(**given()).frames) < 1e-5


def test_embeddings_given_latents_given_and_encode_prompt(installed, wan):
    embeds, negative = installed.encode_prompt("a red circle", "left", max_sequence_length=24)
    assert type(embeds) is torch.Tensor and embeds.device.type == "cpu"
    latents = torch.randn(1, 16, 2, 4, 6)
    given = call(prompt=None, prompt_embeds=embeds, negative_prompt_embeds=negative, latents=latents)
    assert relative(installed(**given).frames, wan(**given).frames) < 1e-5


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda config: FlowMatchEulerDiscreteScheduler(shift=3.0),
        lambda config: DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    ],
    ids=["euler", "dpm"],
)
def test_a_swapped_scheduler(installed, wan, scheduler, monkeypatch):
    for pipe in (installed, wan):
        monkeypatch.setattr(pipe, "scheduler", scheduler(None))
    assert relative(installed(**call()).frames, wan(**call()).frames) < 1e-5


def test_install_and_uninstall_touch_one_instance(chips, wan, monkeypatch):
    other = WanPipeline(**wan.components)
    cls, forward = type(wan), wan.transformer.forward
    tpu.install(wan)
    for device in ("cuda", "cuda:0", "tpu", "xla", "jax", 0, torch.device("cuda", 0)):
        assert wan.to(device) is wan and wan.device == torch.device("cuda:0") == wan._execution_device
    assert all(runner._placed.arrays for runner in wan._tpu.runners.values())
    assert type(wan) is not cls and isinstance(wan, cls) and type(wan).__name__ == "WanPipeline" and type(other) is cls
    assert tpu.install(wan) is wan
    tpu.uninstall(wan)
    assert type(wan) is cls and wan.transformer.forward == forward and "_tpu" not in vars(wan)
    assert "_tpu_runner" not in vars(wan.transformer) and not hasattr(wan.transformer, "_hf_hook")
    assert tpu.uninstall(wan) is wan
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    with pytest.raises(RuntimeError, match="DIFFUSERS_TPU=cpu"):
        tpu.install(wan)
    with pytest.raises(ValueError, match="install"):
        tpu.report(wan)


def test_to_a_dtype_and_to_nowhere(chips, wan):
    pipe = WanPipeline(**copy.deepcopy(wan.components))
    pipe.to("cuda", torch.bfloat16)
    assert pipe.transformer.proj_out.weight.dtype == torch.bfloat16
    array = pipe.transformer._tpu_runner.place().arrays["proj_out.weight"]
    assert array.dtype == "bfloat16"
    with pytest.raises(ValueError, match="'mps'"):
        pipe.to("mps")
    pipe.to(torch.float32)
    assert pipe.transformer.proj_out.weight.dtype == torch.float32
    pipe.to("cpu")


def test_saved_and_loaded_by_its_upstream_name(installed, tmp_path):
    ours = installed(**call()).frames
    installed.save_pretrained(tmp_path / "wan")
    assert '"_class_name": "WanPipeline"' in (tmp_path / "wan" / "model_index.json").read_text()
    again = WanPipeline.from_pretrained(tmp_path / "wan")
    again.set_progress_bar_config(disable=True)
    assert again._tpu.glue == "resident"
    assert relative(again(**call()).frames, ours) < 1e-6
    assert "_tpu" in vars(WanPipeline.from_pretrained(tmp_path / "wan", device_map="cuda"))
    assert "_tpu" not in vars(WanPipeline.from_pretrained(tmp_path / "wan", device_map="cpu"))
    with pytest.raises(NotImplementedError, match="device_map"):
        WanPipeline.from_pretrained(tmp_path / "wan", device_map={"vae": 0})


def test_the_class_by_its_own_name_installs_itself(chips, wan, monkeypatch):
    from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline as Flax

    theirs = np.asarray(wan(**call()).frames)
    pipe = Flax(**wan.components)
    assert relative(pipe(**call()).frames, theirs) < 1e-5 and "_tpu" in vars(pipe)
    tpu.uninstall(pipe)
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    assert "_tpu" not in vars(Flax(**wan.components))


@pytest.mark.parametrize(
    "module",
    [
        *(f"pipelines.wan.pipeline_wan{kind}" for kind in ("", "_i2v", "_video2video", "_vace", "_animate")),
        *(f"pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5{kind}" for kind in ("", "_image2video")),
        *(
            f"pipelines.cogvideo.pipeline_cogvideox{kind}"
            for kind in ("", "_image2video", "_video2video", "_fun_control")
        ),
        *(f"models.transformers.transformer_{name}" for name in ("wan", "wan_vace", "wan_animate", "hunyuan_video15")),
        "models.transformers.cogvideox_transformer_3d",
        *(f"models.autoencoders.autoencoder_kl_{name}" for name in ("wan", "hunyuanvideo15", "cogvideox")),
    ],
)
def test_a_module_by_its_own_name_has_every_name_of_upstreams(module):
    ours, theirs = (importlib.import_module(f"diffusers.{module}{end}") for end in ("_flax", ""))
    for name, value in vars(theirs).items():
        assert name in vars(ours) or getattr(ours, name) is value
    with pytest.raises(AttributeError, match="FlaxNothing"):
        ours.FlaxNothing
