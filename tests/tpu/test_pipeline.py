"""One pipeline and its scheduler's steps. Oracle: the same without the TPU path, in the same process, with the same weights and generator."""

import collections
import contextlib
import copy
import importlib
import pickle

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

import tiny
from conftest import relative
from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    tpu,
)
from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline as Flax
from diffusers.tpu import bridge
from diffusers.tpu.compile import numbers
from diffusers.tpu.pipelines import glue
from diffusers.tpu.pipelines.stepping import as_programs, observed, steps_of


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


def call(**changes):
    return {**tiny.arguments("wan"), **changes}


WAYS = [
    {"guidance_scale": 1.0, "output_type": "pt"},
    {"guidance_scale": 1.0, "num_videos_per_prompt": 4},
    {"prompt": ["a red circle", "moving left"], "num_videos_per_prompt": 1},
    {"num_videos_per_prompt": 3, "output_type": "latent"},
    {"generator": [tiny.fresh(5)]},
    {"scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)},
    {"scheduler": DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)},
]


@pytest.mark.parametrize("changes", WAYS, ids="-".join)
def test_ways_to_call(installed, wan, monkeypatch, changes):
    """Also with another scheduler. As much of the batch as divides the chips is on dp: videos, of one video its guidance branches."""
    found, programs = [], installed.transformer._tpu_runner.programs.values()
    before = {id(program): program.calls for program in programs}
    for pipe in (installed, wan):
        own = copy.deepcopy(changes)
        monkeypatch.setattr(pipe, "scheduler", own.pop("scheduler", pipe.scheduler))
        found.append(pipe(**call(**own)).frames)
    assert relative(*found) < 1e-5
    programs = installed.transformer._tpu_runner.programs.values()
    ran = {program.mesh.devices.shape for program in programs if program.calls > before.get(id(program), 0)}
    dp = changes.get("num_videos_per_prompt", 1) if changes.get("guidance_scale") else 2
    assert ran == {(dp, 8 // dp, 1)}


@pytest.mark.parametrize("name, given", [("__call__", {"guidance_scale": 1.5}), ("encode_prompt", {"prompt": "left"})])
def test_a_method_replaced_on_upstreams_class_is_called(installed, wan, monkeypatch, name, given):
    own = getattr(WanPipeline, name)
    monkeypatch.setattr(WanPipeline, name, lambda self, **kwargs: own(self, **kwargs | given))
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


def test_saved_and_loaded_by_its_upstream_name(installed, tmp_path):
    installed.to("cuda").save_pretrained(tmp_path / "wan")
    assert '"_class_name": "WanPipeline"' in (tmp_path / "wan" / "model_index.json").read_text()
    again = WanPipeline.from_pretrained(tmp_path / "wan")
    assert again._tpu.glue == "resident"
    assert again.scheduler.config.items() <= installed.scheduler.config.items()
    for name in ("text_encoder", "transformer", "vae"):
        loaded, saved = (getattr(pipe, name).state_dict() for pipe in (again, installed))
        assert loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert "_tpu" in vars(WanPipeline.from_pretrained(tmp_path / "wan", device_map="cuda"))
    assert "_tpu" not in vars(WanPipeline.from_pretrained(tmp_path / "wan", device_map="cpu"))
    with pytest.raises(NotImplementedError, match="device_map"):
        WanPipeline.from_pretrained(tmp_path / "wan", device_map={"vae": 0})


def test_the_class_by_its_own_name_installs_itself(chips, wan, monkeypatch):
    theirs = np.asarray(wan(**call()).frames)
    pipe = Flax(**wan.components)
    assert relative(pipe(**call()).frames, theirs) < 1e-5 and "_tpu" in vars(pipe)
    tpu.uninstall(pipe)
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    assert "_tpu" not in vars(Flax(**wan.components))


BESIDE = {  # a folder of upstream's, and its modules that have one of ours beside them
    "pipelines.wan.pipeline_wan": ("", "_i2v", "_video2video", "_vace", "_animate"),
    "pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5": ("", "_image2video"),
    "pipelines.cogvideo.pipeline_cogvideox": ("", "_image2video", "_video2video", "_fun_control"),
    "models.transformers.": ("cogvideox_transformer_3d",),
    "models.transformers.transformer_": ("wan", "wan_vace", "wan_animate", "hunyuan_video15"),
    "models.autoencoders.autoencoder_kl_": ("wan", "hunyuanvideo15", "cogvideox"),
}


def test_a_module_by_its_own_name_has_every_name_of_upstreams():
    for module in (f"diffusers.{start}{end}" for start, ends in BESIDE.items() for end in ends):
        ours, theirs = (importlib.import_module(f"{module}{end}") for end in ("_flax", ""))
        for name, value in vars(theirs).items():
            found, installs = getattr(ours, name), name.endswith("Pipeline") and value.__module__ == theirs.__name__
            assert name in vars(ours) or (found is value) != installs, (module, name)
            assert not installs or (issubclass(found, value) and found is getattr(ours, name)), (module, name)
        with pytest.raises(AttributeError, match="FlaxNothing"):
            ours.FlaxNothing


# Steps of schedulers: upstream's, stepped on the host with the same tensors; counted traces


SHAPE = (1, 3, 5)


@pytest.fixture
def inside(chips, make_mesh):
    """Where device tensors work, as in a pipeline's call; a function that moves tensors there, laid out as a program's results."""
    env, mesh = bridge.environment(), make_mesh(1, 2, 1)

    def moved(tensor):
        array = env.moved(tensor).jax()
        return bridge.to_torch(jax.device_put(array, NamedSharding(mesh, PartitionSpec(*[None] * array.ndim))))

    with bridge.quiet_integers(), bridge.decomposing(), env:
        yield moved


class Counting(FlowMatchEulerDiscreteScheduler):
    """Reads what no attribute holds: how often each was stepped."""

    steps = collections.Counter()

    def step(self, model_output, *args, **kwargs):
        self.steps[id(self)] += 1
        return super().step(model_output * self.steps[id(self)], *args, **kwargs)


def made(name):
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return {
        "unipc": lambda: UniPCMultistepScheduler(**flow),
        "unipc 3": lambda: UniPCMultistepScheduler(solver_order=3),
        "flow": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
        "dpm": lambda: DPMSolverMultistepScheduler(algorithm_type="dpmsolver++"),
        "ddim": DDIMScheduler,
        "cogvideox": CogVideoXDDIMScheduler,
        "euler": EulerDiscreteScheduler,
        "ancestral": EulerAncestralDiscreteScheduler,
        "script's": lambda: Counting(shift=3.0),
    }[name]()


def stepped(scheduler, there, steps=7, seed=0, change=None, tables="cpu"):
    """The samples of one schedule from fresh noise; `there` moves them. `tables`: the device of the schedule."""
    generator = torch.Generator().manual_seed(seed)
    scheduler.set_timesteps(steps, device=tables)
    sample, found = torch.randn(SHAPE, generator=generator), []
    outputs = [torch.randn(SHAPE, generator=generator) for _ in scheduler.timesteps]
    noise = {"generator": generator} if isinstance(scheduler, EulerAncestralDiscreteScheduler) else {}
    sample = there(sample)
    for number, (t, output) in enumerate(zip(scheduler.timesteps, outputs)):
        if change is not None and number == 3:
            change(scheduler)
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(sample, t)
        sample = scheduler.step(there(output), t, sample, return_dict=False, **noise)[0]
        found.append(sample)
    return found


def on_host(samples):
    return torch.stack([glue.on_host(sample).float() for sample in samples])


@pytest.mark.parametrize(
    "name, tables",
    [
        *((name, "jax") for name in ("unipc", "unipc 3", "flow", "dpm", "ddim", "cogvideox", "euler", "ancestral")),
        ("unipc", "cpu"), ("euler", "cpu"), ("script's", "cpu"),
    ],
)  # fmt: skip
def test_steps_are_upstreams_the_first_time_and_later(inside, name, tables):
    theirs, ours, unmoved = made(name), made(name), lambda tensor: tensor
    traces, seen = [], []
    watched = observed(ours, seen.append) if name == "unipc 3" else contextlib.nullcontext()
    with as_programs([ours]):
        with watched:
            for steps, seed in ((7, 0), (7, 1), (5, 2), (7, 3)):
                want = torch.stack(stepped(theirs, unmoved, steps, seed))
                got = on_host(stepped(ours, inside, steps, seed, tables=tables))
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
                traces.append(steps_of(ours).traces)
        with bridge.environment().left():  # in a callback
            assert {*map(type, (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))))} == {type(theirs)}
    assert type(ours) is type(theirs) and len(seen) == (26 if name == "unipc 3" else 0)
    assert traces[-1] - traces[-2] <= 3 or name == "ancestral"  # UniPC's first ones see what the schedule before left
    programs = [one for steps in steps_of(ours).recorded.values() for one in steps.values() if one is not None]
    # One that draws noise: operation by operation, the same noise.
    assert bool(programs) == (name not in ("ancestral", "script's"))


@pytest.mark.parametrize("name, executables", [("unipc", 4), ("flow", 1)])  # first, second, middle, last
def test_steps_that_differ_in_numbers_are_one_executable(inside, name, executables):
    numbers.jitted_by_text.clear()
    scheduler = made(name)
    with as_programs([scheduler]):
        stepped(scheduler, inside, 20, tables="jax")
    (steps,) = steps_of(scheduler).recorded.values()
    assert len(steps) == 20
    assert len(numbers.jitted_by_text) <= executables


@pytest.mark.parametrize(
    "change", ["table in place", "table by numpy", "table on the chips", "attribute", "configuration"]
)
def test_what_somebody_changes_between_steps_is_seen(inside, change):
    def changed(scheduler):
        if change in ("table in place", "table on the chips"):
            scheduler.sigmas[4:] *= 0.5
        elif change == "table by numpy":
            scheduler.sigmas.numpy()[4:] *= 0.5
        elif change == "attribute":
            scheduler.disable_corrector = [3, 4]
        else:
            scheduler.register_to_config(solver_order=1)

    name, tables = ("flow", "jax") if change == "table on the chips" else ("unipc", "cpu")
    theirs, ours = made(name), made(name)
    with as_programs([ours]):
        stepped(ours, inside, seed=4, tables=tables)  # without the change, so that a stale program is there
        want = torch.stack(stepped(theirs, lambda tensor: tensor, seed=4, change=changed))
        got = on_host(stepped(ours, inside, seed=4, change=changed, tables=tables))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
