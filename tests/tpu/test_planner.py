"""Oracles: upstream's own run of a tiny pipeline, torch's FLOP counter, published parameter counts, memory_analysis."""

import json
import math
import re
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny
from bench.naming import programs_of
from conftest import slow
from diffusers import CogVideoXDPMScheduler, StableDiffusionControlNetPipeline, WanPipeline
from diffusers.models import embeddings
from diffusers.models.transformers.transformer_wan_flax import PLAN as WAN
from diffusers.tpu import planner
from diffusers.tpu.apps import cli
from diffusers.tpu.chips.figures import find_topology
from diffusers.tpu.compile import programs
from diffusers.tpu.planner import aot, building, plan, worker
from diffusers.tpu.planner.building import build, configuration_of
from diffusers.tpu.planner.meshes import Denoiser, allowed, guess
from diffusers.tpu.planner.published import ALIASES, MODELS
from diffusers.tpu.planner.recording import record
from diffusers.tpu.planner.runs import stage_of
from diffusers.tpu.planner.work import count


SHAPES = "examples/tpu/models/wan-shapes"
FIELDS = {
    **dict.fromkeys(("model", "topology"), str),
    **dict.fromkeys(("mesh", "hbm_gib_per_chip", "seconds_per_step", "versions"), dict),
    **dict.fromkeys(("seconds_total", "flops_per_step", "mfu", "compile_seconds"), float),
    "fits": bool,
}


# A pipeline without weights


@pytest.fixture(scope="module")
def parts() -> dict:
    return {}


def zeros_in_place_of_positions(embed_dim: int, grid, output_type: str) -> torch.Tensor:
    return torch.zeros(()).expand(grid[0].numel(), embed_dim)


@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_their_published_size(name, parts, monkeypatch):
    """As their authors state it; a part of several models is built once, tables of positions, which are no parameters, stay zeros."""
    build_part = building._component
    monkeypatch.setattr(embeddings, "get_2d_sincos_pos_embed_from_grid", zeros_in_place_of_positions)

    def part(component, class_name, config, configuration, dtype):
        key = class_name, json.dumps(config, sort_keys=True), configuration.tokens.get(component)
        if key not in parts:
            parts[key] = build_part(component, class_name, config, configuration, dtype)
        return parts[key]

    monkeypatch.setattr(building, "_component", part)
    built = build(configuration_of(name), torch.bfloat16)
    for component, billions in MODELS[name].billions.items():
        parameters = getattr(built, component).parameters()
        assert sum(p.numel() for p in parameters) / 1e9 == pytest.approx(billions, abs=0.06), component
    assert set(ALIASES.values()) <= set(MODELS)


# What a run asks of its models


@pytest.mark.parametrize("name", ["wan", slow("hunyuan15"), "hunyuan15_i2v", "cogvideox"])
def test_recorded_calls_are_those_of_upstreams_run(name, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    arguments = {**tiny.arguments(name), "output_type": "pt"}
    real, recorded, seen = tiny.make(name), tiny.make(name), Counter()
    for pipe in (real, recorded) if name == "cogvideox" else ():  # whose step takes its old prediction too
        pipe.scheduler = CogVideoXDPMScheduler.from_config(pipe.scheduler.config)

    def watch(module, component: str, entry: str, method):
        def run(*args, **kwargs):
            tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            seen[(component, entry, *sorted(tuple(t.shape) for t in tensors))] += 1
            return method(*args, **kwargs)

        setattr(module, entry, run)

    for component, module in real.components.items():
        if isinstance(module, torch.nn.Module):
            for entry in ("decode", "encode") if component == "vae" else ("forward",):
                watch(module, component, entry, getattr(module, entry))
    real(**arguments)
    recording = record(recorded, arguments)
    ours = Counter()
    for r in recording.calls:
        ours[(r.component, r.call.entry, *sorted(tuple(t.shape) for t in r.call.tensors))] += r.count
    assert ours == seen
    assert recording.steps == arguments["num_inference_steps"] == 3
    if name == "wan":  # the guidance branches of a step are seen
        assert [r.groups for r in recording.calls if r.component == "transformer"] == [[2, 2, 2]]


def test_a_controlnets_calls_are_of_a_step():
    parts = {**tiny.sd().components, "controlnet": tiny.controlnet(), "safety_checker": None}
    pipe = StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False)
    asked = {"prompt": "word", "image": torch.zeros(1, 3, 64, 80), "num_inference_steps": 3, "output_type": "latent"}
    recording = record(pipe, asked)
    calls = {r.component: r.count for r in recording.calls if stage_of(r.component) == "denoise"}
    assert calls == dict.fromkeys(("controlnet", "unet"), recording.steps)
    with pytest.raises(
        ValueError, match="StableDiffusionControlNetPipeline takes .*got nonsense"
    ):  # by **kwargs it would
        record(pipe, {**asked, "nonsense": 3})


# Counts


@pytest.fixture
def counted(attach):
    """A function from a Wan transformer and latents [B, 16, F, H, W] to (the work that is counted, its call)."""

    def counted(transformer, latents: torch.Tensor):
        batch = len(latents)
        texts = torch.zeros(()).expand(batch, 20, 32)
        inputs = {"hidden_states": latents, "timestep": torch.full((batch,), 3.0), "encoder_hidden_states": texts}
        runner = attach(transformer, 1, 1, 1)
        work = count(runner.trace(runner.flatten_call("forward", (), inputs)).traced.jaxpr)
        runner.detach()
        return work, inputs

    return counted


def test_floating_point_operations_are_torchs(counted):
    transformer = tiny.wan().transformer
    work, inputs = counted(transformer, torch.randn(2, 16, 3, 10, 14))
    with FlopCounterMode(display=False) as counter:
        transformer(**inputs)
    assert work.products == counter.get_total_flops()  # it leaves fused attention out
    assert work.attention == 3 * 2 * 2 * (2 * 4 * 105 * 12) * (105 + 20)
    assert work.by_module["blocks.*.ffn.net.2"] == 3 * 2 * 2 * 105 * 64 * 48


def test_the_cheap_model_prefers_what_compiled_programs_show(counted):
    transformer = tiny.wan(transformer={"num_attention_heads": 40}).transformer
    work, _ = counted(transformer, torch.zeros(()).expand(1, 16, 5, 60, 80))
    slice_ = find_topology("v6e-8")
    guided = Denoiser(WAN, work, 1, 2, 10**8)
    assert (2, 4, 1) in allowed(slice_, [guided]) and (8, 1, 1) not in allowed(slice_, [guided])
    assert all(40 % tp == 0 and math.prod((dp, sp, tp)) == 8 for dp, sp, tp in allowed(slice_, [guided]))
    assert guess((2, 4, 1), guided, slice_) < guess((2, 1, 4), guided, slice_)
    without = Denoiser(WAN, work, 1, 1, 10**8)
    assert (2, 4, 1) not in allowed(slice_, [without])


# The answer


def test_the_answer_has_its_fields_and_is_what_the_compiler_says(root, capsys):
    arguments = ["plan", str(root / SHAPES), *"--topology v6e-8 --height 64 --width 64 --num-frames 9".split()]
    assert cli.main([*arguments, "--num-inference-steps", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {name: type(answer[name]) for name in FIELDS} == FIELDS
    assert (answer["topology"], answer["mesh"], answer["steps"]) == ("v6e-8", {"dp": 2, "sp": 4, "tp": 1}, 4)
    parts = {(p["component"], p["entry"]): p for p in answer["parts"]}
    assert set(parts) == {("text_encoder", "forward"), ("transformer", "forward"), ("vae", "decode")}
    denoise = parts["transformer", "forward"]
    assert (denoise["how"], denoise["branches"], denoise["runs"]) == ("compiled", 2, 4)
    hbm, m = answer["hbm_gib_per_chip"], denoise["memory_analysis"]
    held = m["arguments"] + m["temporaries"] + m["outputs"] - m["aliased"] + m["program"]
    assert round(denoise["hbm_gib"]["peak"] * 2**30) == held
    assert hbm["weights"] == pytest.approx(sum(p["hbm_gib"]["weights"] for p in parts.values()))
    assert hbm["program"] == pytest.approx(sum(p["hbm_gib"]["program"] for p in parts.values()))
    assert hbm["peak"] == pytest.approx(hbm["weights"] + hbm["activations"] + hbm["program"])
    step = answer["seconds_per_step"]
    assert step["total"] == pytest.approx(sum(step[k] for k in ("attention", "matmul", "other", "collectives")))
    assert min(step.values()) > 0
    assert answer["by_way"]["bound"]["seconds"] == step
    totals = [of["seconds"]["total"] for of in answer["by_way"].values()]
    assert totals == sorted(totals) and totals[0] < totals[-1]  # the program of a run has all ways
    assert all(total < of["slower"] < 1.4 * total for total, of in zip(totals, answer["by_way"].values()))
    assert answer["flops_per_step"] == denoise["flops"]
    assert answer["mfu"] == pytest.approx(denoise["flops"] / step["total"] / 8 / 918e12)
    assert answer["seconds_total"] == pytest.approx(sum(p["runs"] * p["seconds"] for p in parts.values()))
    by_module = denoise["timing"]["by_module"]
    assert {"blocks.*.attn1", "blocks.*.attn2", "blocks.*.ffn"} <= set(by_module)
    assert sum(by_module.values()) == pytest.approx(step["total"])
    assert any(note.startswith("vae: upstream's module") for note in answer["notes"])
    capsys.readouterr()
    assert cli.main([*arguments, "--num-inference-steps", "4"]) == 0  # from the cache
    shown = capsys.readouterr().out
    assert f"{step['total']:.3f} s per step" in shown and "dp 2, sp 4, tp 1" in shown


@pytest.mark.slow
def test_programs_are_named_without_compiling(root):
    """As the answer names them; a program that is traced otherwise has another name, the others keep theirs."""
    size = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 4}
    questions = [
        planner.Question(planner.PLANS, planner.request_of(str(root / SHAPES), "v6e-8", arguments=size, config=config))
        for config in ({}, {"scan": False})
    ]
    ours, others = programs_of(questions)
    answer = questions[0].answer()
    assert (ours["programs"], ours["reader"]) == (answer["programs"], answer["reader"])
    same = [one == other for one, other in zip(ours["programs"], others["programs"], strict=True)]
    parts = [part["component"] for part in answer["parts"]]
    assert dict(zip(parts, same, strict=True)) == {"text_encoder": True, "transformer": False, "vae": True}


def test_what_is_planned_is_what_runs(tmp_path, chips, monkeypatch, own_store):
    """The very text that goes to the compiler, of every component, in the plan of a configuration and in a run."""
    planned, ran, compile_lowered = {}, {}, programs.compile_lowered

    class Listening:
        def __init__(self, topology):
            self.devices, self.topology, self.flags, self.asked_flags = chips, topology, "", ""

        def compile(self, lowered, options=None):
            planned.setdefault(lowered.as_text(), options)
            raise aot.OutOfMemory("enough was heard", None, None)

    def compiled(lowered, options):
        ran.setdefault(lowered.as_text(), options)
        return compile_lowered(lowered, options)

    monkeypatch.setattr(worker, "Compiler", Listening)
    monkeypatch.setattr(worker.ici, "places_of", lambda mesh: [])
    monkeypatch.setattr(worker.advice, "what_would_fit", lambda *others: [])
    monkeypatch.setattr(programs, "compile_lowered", compiled)
    tiny.wan(vae="@wan_vae_shallow", transformer={"num_layers": 2}).save_pretrained(folder := str(tmp_path / "wan"))
    request = {"model": folder, "topology": "v6e-8", "mesh": [2, 4, 1], "dtype": "float32", "batch": 2}
    given = tiny.arguments("wan", height=16, width=32, num_inference_steps=2, generator=None)
    asked = {k: v for k, v in given.items() if k != "output_type" and not k.endswith("prompt")}
    given |= {name: ["two", "words"] for name in ("prompt", "negative_prompt")}
    worker.answer({**request, "everything": True, "arguments": asked}, lambda text: None)
    WanPipeline.from_pretrained(folder)(**given)
    assert len(planned) == 3 and planned == ran  # text encoder, both branches of the transformer, decoder


@pytest.mark.slow
def test_the_best_mesh_is_chosen_from_compiled_ones(root):
    size, one_way = {"height": 64, "width": 64, "num_frames": 9}, {"attention": "online"}  # compiles in half the time
    answer = plan(str(root / SHAPES), "v6e-4", mesh="auto", arguments=size, config=one_way)
    compiled = [r for r in answer["ranking"] if r["seconds_per_step"] is not None]
    assert len(compiled) >= 2 and len(answer["ranking"]) > len(compiled)
    assert min(r["seconds_per_step"] for r in compiled) == pytest.approx(answer["seconds_per_step"]["total"])
    assert next(r["mesh"] for r in compiled if r["mesh"] == answer["mesh"])


BAD = {
    "plan wan3 --topology v6e-8": "published models, got 'wan3'.*wan2.1-t2v-14b",
    f"plan {SHAPES} --topology v6e-7": "expected a topology among v5e-1 .*got 'v6e-7'",
    f"plan {SHAPES} --topology v6e-8 --mesh 2,2,1": "8 devices of v6e-8, got 2,2,1 = 4",
    f"plan {SHAPES} --topology v6e-16 --mesh 1,1,16 --num-frames 1": "tp to divide the attention heads .8.*, got tp 16",
    f"plan {SHAPES} --topology v6e-8 --num-frames 8": "num_frames that the VAE can take, 4k.1, got 8; ask for 5 or 9",
    f"plan {SHAPES} --topology v6e-8 --batch 0": "batch of at least 1",
    f"plan {SHAPES} --topology v6e-8 --report nowhere/x.html": "folder that is there",
    f"plan --eta 0.5 {SHAPES} --topology v6e-8": "MODEL before arguments of the pipeline, got --eta 0.5",
    "bench attention --shape round": "--shape to be one of .*wan-720p-self",
    "bench step --chip v6e": "got --chip",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(words, root, capsys, monkeypatch):
    """Here what a child would raise; that a refusal comes back from there, test_planner_program shows."""
    in_this_process = lambda _, request, on_progress, **rest: worker.answer(request, on_progress)  # noqa: E731
    monkeypatch.setattr(planner, "run_in_child", in_this_process)
    monkeypatch.chdir(root)
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and re.search(BAD[words], said), said


@pytest.mark.slow
def test_what_does_not_fit_says_by_how_much_and_what_would(capsys):
    assert cli.main(["plan", "wan2.1-t2v-14b", "--topology", "v5e-1", "--height", "480", "--width", "832"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"does not fit by \d+\.\d+ GiB per chip", shown)
    assert re.search(r"what would fit: use v5e-\d+: \d+\.\d+ of 15.75 GiB per chip", shown)
