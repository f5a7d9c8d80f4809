"""The example scripts with the earlier scripts' flags. Oracle: those flags read by hand; upstream's frames, its transformer's answer."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import denoisers
import flags
import tiny
from conftest import ROOT, relative
from diffusers import AutoencoderKLCogVideoX, DiffusionPipeline, HunyuanVideo15Transformer3DModel
from diffusers.tpu import TPUConfig
from diffusers.tpu.planner.published import MODELS


EXAMPLES = ROOT / "examples/tpu"
LAID_OUT = (  # scripts with the flags for chips and attention
    "wan/generate_flax.py",
    "hunyuan_video15/generate_diffusers_flax.py",
    "hunyuan_video15/dit_flax.py",
    "cogvideox/generate_flax.py",
    "cogvideox/dit_flax.py",
)
WAN, HUNYUAN, DIT, COG, COG_DIT = LAID_OUT
COG_VAE = "cogvideox/vae_flax.py"
SCRIPTS = (*LAID_OUT, COG_VAE)
WAN_SHAPES = EXAMPLES / "models/wan-shapes"


def load(name: str):
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(chips, monkeypatch, capsys, tmp_path):
    """A function that runs a script with these words, in an empty folder; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(script, words: str, *more: str) -> str:
        monkeypatch.setattr(sys, "argv", [script.__name__, *words.split(), *more])
        script.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def written(monkeypatch) -> list:
    """The frames of each video that a script writes."""
    frames, export = [], flags.export_to_video
    monkeypatch.setattr(
        flags, "export_to_video", lambda video, *a, **k: frames.append(video) or export(video, *a, **k)
    )
    return frames


BLOCKS = TPUConfig(attention_blocks=(3328, 2816, 256))
CONFIGS = {
    "": TPUConfig(),
    "--use_custom_attention --bqsize 3328 --bkvsize 2816 --bkvcomputesize 256": BLOCKS,
    "--use_custom_attention False --use_k_smooth false": TPUConfig(attention="splash", attention_smoothing=False),
    "--use_dp": TPUConfig(mesh=(2, 4, 1)),
    "--use_dp False": TPUConfig(mesh=(1, 8, 1)),
    "--sp_num 2": TPUConfig(mesh=(2, 4, 1), attention_ring=2),
    "--use_fsdp False --sp_num 2 --use_dp False": TPUConfig(mesh=(1, 2, 4)),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_flags_as_configuration(name):
    parser = load(name).make_parser()
    for words, config in CONFIGS.items():
        assert flags.config_of(parser.parse_args(words.split()), 8) == config, words
    if name in (DIT, COG_DIT):  # a model by itself splits a batch of branches only
        args = parser.parse_args([])
        assert [flags.config_of(args, 8, branches).mesh for branches in (1, 2)] == [(1, 8, 1), (2, 4, 1)]


BAD = {
    "--bqsize 256": (WAN, "all of --bqsize, --bkvsize, --bkvcomputesize or none"),
    "--bqsize 256 --bkvsize 256 --bkvcomputesize 100": (WAN, "a divisor of those"),
    "--sp_num 3": (DIT, "that divide the 8 chips"),
    "--use_dp perhaps": (WAN, "expected True or False, got 'perhaps'"),
    "--profile x --num_inference_steps 1": (HUNYUAN, "more than 1 with --profile"),
    "--output nowhere/x.mp4": (WAN, "--output of an mp4 in a folder that is there"),
    "--num_iterations 0": (HUNYUAN, "--num_iterations of 1 or more, got 0"),
    "--height 480": (HUNYUAN, "--height and --width together"),
    "--height 480 --width 832 --image x.png": (HUNYUAN, "no --height and --width with --image"),
    f"--model_id {WAN_SHAPES}": (HUNYUAN, "--model_id of HunyuanVideo-1.5, got a WanPipeline"),
    "--resolution 1080p": (DIT, "invalid choice: '1080p'"),
    f"--model_id {WAN_SHAPES} --prompt x": (COG, "--model_id of CogVideoX, text-to-video, got a WanPipeline"),
    "--width 100": (COG_VAE, "--width of a multiple of 8, got 100"),
    "--use_dp": (COG_VAE, "unrecognized arguments"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_flags_are_refused_before_anything_is_loaded(run, capsys, words):
    name, expected = BAD[words]
    with pytest.raises(SystemExit) as stop:
        run(load(name), words)
    assert stop.value.code == 2 and expected in capsys.readouterr().err


def test_without_a_tpu(run, monkeypatch, capsys):
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    for name in SCRIPTS:
        with pytest.raises(SystemExit):
            run(load(name), "")
        assert "DIFFUSERS_TPU=cpu" in capsys.readouterr().err


def upstreams(folder, monkeypatch):
    """The pipeline in `folder`, without the TPU path."""
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_wan_gives_upstreams_frames_and_a_trace(run, written, monkeypatch):
    words = f"--model_id {WAN_SHAPES} --width 32 --height 48 --frames 5 --fps 8 --num_inference_steps 3"
    words += " --guidance_scale 2 --seed 6 --dtype float32 --flow_shift 2 --profile trace"
    words += " --bqsize 256 --bkvsize 256 --bkvcomputesize 128"
    prompt = "a red circle moving right"
    out = run(load(WAN), words, "--prompt", prompt)
    assert "mesh dp 2, sp 4, tp 1" in out and "reference" in out and "traced steps 2 to 3 into trace" in out
    assert Path("output.mp4").stat().st_size and list(Path("trace").rglob("*.xplane.pb"))

    pipe = upstreams(WAN_SHAPES, monkeypatch)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=2.0)
    theirs = pipe(
        prompt, height=48, width=32, num_frames=5, num_inference_steps=3, guidance_scale=2.0,
        generator=torch.Generator().manual_seed(6),
    ).frames[0]  # fmt: skip
    assert np.shape(theirs) == (5, 48, 32, 3)
    assert relative(written[0], theirs) < 1e-5  # 2e-6


@pytest.fixture
def hunyuan(monkeypatch, tmp_path):
    """A function from a task to a folder with a tiny HunyuanVideo-1.5 and the arguments of a small call."""
    tiny.short_texts(monkeypatch)

    def save(task: str):
        pipe, call = tiny.staged(f"hunyuan_{task}_to_video")
        pipe.save_pretrained(tmp_path / task)
        return tmp_path / task, call

    return save


def run_and_look(run, script, monkeypatch, words: str, prompts: dict, output: str, batch: bool, runs: int):
    """Runs a script; the pipeline that it made. Looks at the mesh, times, trace and file."""
    seen, where = [], script.where
    monkeypatch.setattr(script, "where", lambda pipe, target: seen.append(pipe) or where(pipe, target))
    given = [word for name, text in prompts.items() for word in (f"--{name}", text)]
    out = run(script, f"{words} --num_inference_steps 3 --seed 6 --fps 8 --dtype float32 {output} video.mp4", *given)
    assert ("mesh dp 2, sp 4, tp 1" if batch else "mesh dp 1, sp 8, tp 1") in out
    assert out.count("a step after the first") == runs
    traced = "--profile" in words
    assert ("traced steps 2 to 3 into trace" in out) == bool(list(Path("trace").rglob("*.xplane.pb"))) == traced
    assert Path("video.mp4").stat().st_size and seen[0].vae.use_tiling == ("--disable_vae_tiling" not in words)


@pytest.mark.parametrize(
    "task, words, guidance",
    [
        ("text", "--height 32 --width 48 --guidance_scale 2.5 --disable_vae_tiling --num_iterations 2 --profile trace", 2.5),
        pytest.param("image", "--image first.png --guidance_scale 1 --num_iterations 1 --use_dp False", None, marks=pytest.mark.slow),
    ],
    ids=["text", "image"],
)  # fmt: skip
def test_hunyuan_video_gives_upstreams_frames(run, written, hunyuan, monkeypatch, task, words, guidance):
    folder, call = hunyuan(task)
    if task == "image":
        call["image"].save("first.png")
    words += f" --model_id {folder} --num_frames 5"
    prompts = {"prompt": 'a circle with "left" on it', "negative_prompt": "blurred"}
    script, batch = load(HUNYUAN), guidance is not None
    run_and_look(run, script, monkeypatch, words, prompts, "--output_path", batch, 2 if batch else 1)
    with pytest.raises(SystemExit):  # the other task
        run(script, f"--model_id {folder}" + (" --image x.png" if task == "text" else ""))

    pipe = upstreams(folder, monkeypatch)
    pipe.guider = pipe.guider.new(guidance_scale=guidance) if guidance else pipe.guider.new(enabled=False)
    theirs = pipe(**{**call, **prompts}, generator=torch.Generator().manual_seed(6)).frames[0]
    assert relative(written[0], theirs) < 1e-5


def test_the_transformer_by_itself_gives_upstreams_answer(run, hunyuan, monkeypatch):
    folder, _ = hunyuan("text")
    script, answers = load(DIT), []
    monkeypatch.setattr(script, "SIZES", {"480p": (48, 80)})
    for name, count in {"TEXT": 11, "GLYPHS": 5, "IMAGE": 3}.items():
        monkeypatch.setattr(script, name, count)
    once = script.run
    monkeypatch.setattr(script, "run", lambda *args: answers.append(once(*args)) or answers[-1])
    words = f"--model_path {folder} --resolution 480p --frames 5 --num_runs 2 --enable_cfg --seed 3 --dtype float32"
    out = run(script, words + " --profile trace")
    assert "mesh dp 2, sp 4, tp 1" in out and "480p, 5 frames, batch 2: 30 tokens and 19 of text" in out
    assert "2 runs: mean" in out and list(Path("trace").rglob("*.xplane.pb")) and len(answers) == 3

    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    model = HunyuanVideo15Transformer3DModel.from_pretrained(folder, subfolder="transformer")
    inputs = script.make_inputs(model.config, 5, "480p", 2, 3, torch.float32)
    assert inputs["hidden_states"].shape == (2, model.config.in_channels, 2, 3, 5)
    theirs = once(model, inputs)
    assert all(relative(answer, theirs) < 1e-5 for answer in answers)


@pytest.fixture
def cogvideox(monkeypatch, tmp_path):
    """A function from a published kind to a folder with a tiny CogVideoX."""

    def save(kind: str) -> Path:
        pipe = getattr(tiny, f"cogvideox_{kind}")()
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                tiny.with_uneven_norms(module)
        pipe.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


@pytest.mark.parametrize(
    "kind, words, call",
    [
        ("2b", "--height 16 --width 32 --frames 9 --guidance_scale 2.5 --num_iterations 2 --profile trace",
         {"height": 16, "width": 32, "num_frames": 9, "guidance_scale": 2.5}),
        ("5b", "--use_dynamic_cfg --disable_vae_tiling --num_iterations 1 --use_dp False", {"use_dynamic_cfg": True}),
    ],
    ids=["2b", "5b-of-its-own-size"],
)  # fmt: skip
def test_cogvideox_gives_upstreams_frames(run, written, cogvideox, monkeypatch, kind, words, call):
    folder, first = cogvideox(kind), kind == "2b"
    prompts = {"prompt": "a red circle", "negative_prompt": "a circle moving left"}
    run_and_look(
        run, load(COG), monkeypatch, f"{words} --model_id {folder}", prompts, "--output", first, 2 if first else 1
    )
    pipe = upstreams(folder, monkeypatch)
    call = {"guidance_scale": 6.0, "num_inference_steps": 3, "output_type": "np", **prompts, **call}
    theirs = pipe(**call, generator=torch.Generator().manual_seed(6)).frames[0]
    assert relative(written[0], theirs) < 1e-5


@pytest.mark.parametrize("kind, frames, tokens", [("1.5", 17, 36)])
def test_cogvideoxs_transformer_by_itself_gives_upstreams_answer(run, monkeypatch, tmp_path, kind, frames, tokens):
    """1.5 has two frames of latents in a token: the five of 17 frames are filled up to six."""
    model = denoisers.built(f"cogvideox {kind}")
    model.save_pretrained(tmp_path / "model/transformer")
    script, answers = load(COG_DIT), []
    monkeypatch.setattr(script, "SIZES", {"480p": (64, 48)})
    once = script.run
    monkeypatch.setattr(script, "run", lambda *args: answers.append(once(*args)) or answers[-1])
    words = (
        f"--model_path model --resolution 480p --frames {frames} --num_runs 2 --enable_cfg --seed 3 --dtype float32"
    )
    out = run(script, words + " --profile trace")
    assert "mesh dp 2, sp 4, tp 1" in out and f"{tokens} tokens and {denoisers.WORDS} of text" in out
    assert "2 runs: mean" in out and list(Path("trace").rglob("*.xplane.pb")) and len(answers) == 3

    inputs = script.make_inputs(model, frames, "480p", 2, 3, torch.float32)
    theirs = once(model, inputs)
    assert all(relative(answer, theirs) < 1e-5 for answer in answers)


@pytest.mark.parametrize(
    "words, shapes",
    [
        ("--frames 9 --compare --profile trace", [[1, 3, 9, 16, 32], [1, 4, 3, 2, 4]]),
        ("--frames 1 --only decode --enable_tiling --batch 2", [[2, 4, 1, 2, 4]]),
        ("--flax --frames 9 --compare", [[1, 3, 9, 16, 32], [1, 4, 3, 2, 4]]),
    ],
    ids=["both", "decode", "flax"],
)
def test_cogvideoxs_vae_by_itself_gives_upstreams_answer(run, cogvideox, monkeypatch, words, shapes):
    folder, script, calls = cogvideox("2b"), load(COG_VAE), []
    for form in ("upstreams", "in_flax"):
        once = getattr(script, form)

        def noted(vae, entry, x, once=once):
            answer = once(vae, entry, x)
            calls.append((vae, entry, x, answer))
            return answer

        monkeypatch.setattr(script, form, noted)
    words += f" --model_id {folder} --height 16 --width 32 --num_runs 1 --seed 4 --dtype float32"
    out = run(script, words)
    assert ("Flax NNX" in out) == ("--flax" in words) and "mesh dp 1, sp 8, tp 1; " in out
    for shape in shapes:
        assert f"code {shape}, float32" in out
    assert out.count("1 runs: mean") == len(shapes)
    found = [float(error) for error in re.findall(r"relative (\S+)", out)]
    assert len(found) == (len(shapes) if "--compare" in words else 0) and all(error < 1e-5 for error in found)
    if "--profile" in words:
        assert all(list(Path("trace", entry).rglob("*.xplane.pb")) for entry in script.ENTRIES)

    vae = AutoencoderKLCogVideoX.from_pretrained(folder, subfolder="vae")
    if "--enable_tiling" in words:
        vae.enable_tiling()
    with torch.no_grad():
        for one, entry, x, answer in calls:
            assert one.use_tiling == vae.use_tiling
            theirs = vae.encode(x).latent_dist.mode() if entry == "encode" else vae.decode(x).sample
            assert relative(answer, theirs) < 1e-5


def test_default_models_are_published():
    names = {load(HUNYUAN).MODEL + task for task in ("t2v", "i2v")} | {
        load(DIT).MODEL.format(s) for s in ("480p", "720p")
    }
    assert names | {load(COG).MODEL, load(COG_VAE).MODEL, *load(COG_DIT).MODELS.values()} <= MODELS.keys()
