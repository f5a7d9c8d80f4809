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
from conftest import ROOT, relative, slow
from diffusers import DiffusionPipeline
from diffusers.tpu import TPUConfig
from diffusers.tpu.planner import profile
from diffusers.tpu.planner.published import MODELS


EXAMPLES = ROOT / "examples/tpu"
# Scripts with the flags for chips and attention.
LAID_OUT = [f"hunyuan_video15/{name}.py" for name in ("generate_diffusers_flax", "dit_flax")]
LAID_OUT = ["wan/generate_flax.py", *LAID_OUT, *(f"cogvideox/{name}.py" for name in ("generate_flax", "dit_flax"))]
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
    noted = lambda video, *a, **k: frames.append(video) or export(video, *a, **k)  # noqa: E731
    monkeypatch.setattr(flags, "export_to_video", noted)
    return frames


BLOCKS = TPUConfig(attention_blocks=(3328, 2816, 256))
CONFIGS = {
    "": TPUConfig(),
    "--use_custom_attention --bqsize 3328 --bkvsize 2816 --bkvcomputesize 256": BLOCKS,
    "--bqsize 512": TPUConfig(attention_blocks=(512, 2816, 256)),
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
    "--bkvcomputesize 512": (WAN, "a divisor of those"),
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
    "--model_id i2v": (WAN, "--model_id of Wan, text-to-video, got a WanImageToVideoPipeline"),
    f"--model_id {WAN_SHAPES} --prompt x": (COG, "--model_id of CogVideoX, text-to-video, got a WanPipeline"),
    "--width 100": (COG_VAE, "--width of a multiple of 8, got 100"),
    "--use_dp": (COG_VAE, "unrecognized arguments"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_flags_are_refused_before_anything_is_loaded(run, capsys, words):
    name, expected = BAD[words]
    Path("i2v").mkdir()
    Path("i2v/model_index.json").write_text('{"_class_name": "WanImageToVideoPipeline"}')
    with pytest.raises(SystemExit) as stop:
        run(load(name), words)
    assert stop.value.code == 2 and expected in capsys.readouterr().err


def test_without_a_tpu(run, monkeypatch, capsys):
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    for name in SCRIPTS:
        with pytest.raises(SystemExit):
            run(load(name), "")
        assert "DIFFUSERS_TPU=cpu" in capsys.readouterr().err


@pytest.fixture
def folder(run, monkeypatch, tmp_path):
    """A function from a kind to a folder with a tiny pipeline of it."""
    tiny.short_texts(monkeypatch)

    def save(kind: str) -> Path:
        pipe = tiny.make(kind)
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                tiny.with_uneven_norms(module)
        pipe.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


def with_shift(pipe):
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=2.0)


def with_guider(**settings):
    return lambda pipe: setattr(pipe, "guider", pipe.guider.new(**settings))


PROMPTS = {"prompt": 'a red circle with "left" on it', "negative_prompt": "a circle moving left"}
BLOCK_FLAGS = "--bqsize 256 --bkvsize 256 --bkvcomputesize 128"
TWICE = "--num_iterations 2 --profile trace"  # traced once
ONCE = "--num_iterations 1 --use_dp False"
# Kind: script, its flags, what upstream's pipeline is told, what is changed in that.
VIDEOS = {
    "wan": (
        WAN, f"--width 32 --height 48 --frames 5 --guidance_scale 2 --flow_shift 2 {BLOCK_FLAGS} {TWICE}",
        {"height": 48, "width": 32, "num_frames": 5, "guidance_scale": 2.0}, with_shift,
    ),
    "hunyuan15": (
        HUNYUAN, f"--height 32 --width 48 --num_frames 5 --guidance_scale 2.5 --disable_vae_tiling {TWICE} --output_path a.mp4",
        {"height": 32, "width": 48, "num_frames": 5}, with_guider(guidance_scale=2.5),
    ),
    "hunyuan15_i2v": (
        HUNYUAN, f"--image first.png --num_frames 5 --guidance_scale 1 {ONCE}",
        {"image": tiny.picture(32, 48), "num_frames": 5}, with_guider(enabled=False),
    ),
    "cogvideox_2b": (
        COG, f"--height 16 --width 32 --frames 9 --guidance_scale 2.5 {TWICE} --output a.mp4",
        {"height": 16, "width": 32, "num_frames": 9, "guidance_scale": 2.5}, lambda pipe: None,
    ),
    "cogvideox_5b": (  # of its own size
        COG, f"--use_dynamic_cfg --disable_vae_tiling {ONCE}",
        {"guidance_scale": 6.0, "use_dynamic_cfg": True}, lambda pipe: None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*map(slow, ("wan", "hunyuan15", "hunyuan15_i2v", "cogvideox_5b")), "cogvideox_2b"])
def test_a_script_gives_upstreams_frames_and_a_trace(run, written, folder, monkeypatch, kind):
    name, words, call, change = VIDEOS[kind]
    script, model, seen = load(name), WAN_SHAPES if kind == "wan" else folder(kind), []
    where = script.where
    monkeypatch.setattr(script, "where", lambda pipe, target: seen.append(pipe) or where(pipe, target))
    if "image" in call:
        call["image"].save("first.png")
    prompts = [word for key, text in PROMPTS.items() for word in (f"--{key}", text)]
    common = f"--model_id {model} --num_inference_steps 3 --seed 6 --fps 8 --dtype float32"
    out = run(script, f"{common} {words}", *prompts)
    assert ("mesh dp 1, sp 8, tp 1" if ONCE in words else "mesh dp 2, sp 4, tp 1") in out
    assert ("reference" in out) == ("flow_shift 2, the model's own is 3.0" in out) == (kind == "wan")
    assert out.count("a step after the first") == (2 if TWICE in words else 1)
    traced = "traced steps 2 to 3 into trace" in out
    assert out.count("s outside of steps") == (1 if TWICE in words else 0)
    assert traced == Path("trace").exists() == ("--profile" in words)
    assert not traced or profile.measured(Path("trace"))["modules"][0]["component"] == "transformer"
    (video,) = Path().glob("*.mp4")
    assert video.stat().st_size and (video.name == "a.mp4") == ("a.mp4" in words)
    assert seen[0].vae.use_tiling == (kind != "wan" and "--disable_vae_tiling" not in words)
    if name == HUNYUAN:
        with pytest.raises(SystemExit):  # the other task
            run(script, f"--model_id {model}" + ("" if "image" in call else " --image x.png"))

    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    change(pipe)
    seed = torch.Generator().manual_seed(6)
    theirs = pipe(**PROMPTS, num_inference_steps=3, output_type="np", generator=seed, **call).frames[0]
    assert np.shape(written[0]) == np.shape(theirs) and relative(written[0], theirs) < 1e-5  # 2e-6


# 1.5 of CogVideoX has two frames of latents in a token: the five of 17 frames are filled up to six.
@pytest.mark.parametrize(
    "make, name, size, frames, words",
    [
        (lambda: tiny.hunyuan15().transformer, DIT, (48, 80), 5, "30 tokens and 19 of text"),
        (lambda: denoisers.built("cogvideox 1.5"), COG_DIT, (64, 48), 17, f"36 tokens and {denoisers.WORDS} of text"),
    ],
    ids=["hunyuan", "cogvideox1.5"],
)
def test_a_transformer_by_itself_gives_upstreams_answer(run, monkeypatch, make, name, size, frames, words):
    script, model, answers = load(name), make(), []
    model.save_pretrained("model/transformer")
    monkeypatch.setattr(script, "SIZES", {"480p": size})
    for tokens, count in {"TEXT": 11, "GLYPHS": 5, "IMAGE": 3}.items():
        if name == DIT:
            monkeypatch.setattr(script, tokens, count)
    once = flags.run_transformer
    monkeypatch.setattr(flags, "run_transformer", lambda *args: answers.append(once(*args)) or answers[-1])
    given = "--model_path model --resolution 480p --num_runs 2 --enable_cfg --seed 3 --dtype float32 --profile trace"
    out = run(script, f"{given} --frames {frames}")
    assert "mesh dp 2, sp 4, tp 1" in out and f"480p, {frames} frames, batch 2: {words}" in out
    assert "2 runs: mean" in out and len(answers) == 3
    assert profile.measured(Path("trace"))["modules"][0]["component"] == "transformer"
    config = model.config if name == DIT else model
    theirs = once(model, script.make_inputs(config, frames, "480p", 2, 3, torch.float32))
    assert all(relative(answer, theirs) < 1e-5 for answer in answers)


@pytest.mark.parametrize(
    "words, shapes",
    [
        ("--frames 9 --compare", [[1, 3, 9, 16, 32], [1, 4, 3, 2, 4]]),
        ("--frames 1 --only decode --enable_tiling --batch 2 --profile trace", [[2, 4, 1, 2, 4]]),
        slow("--flax --frames 9 --compare", [[1, 3, 9, 16, 32], [1, 4, 3, 2, 4]]),
    ],
    ids=["both", "decode", "flax"],
)
def test_cogvideoxs_vae_by_itself_gives_upstreams_answer(run, monkeypatch, words, shapes):
    vae, script, calls = tiny.with_uneven_norms(tiny.part("cogvideox_2b.vae")), load(COG_VAE), []
    vae.save_pretrained("model/vae")
    for form in ("upstreams", "in_flax"):
        once = getattr(script, form)

        def noted(vae, entry, x, once=once):
            answer = once(vae, entry, x)
            calls.append((vae, entry, x, answer))
            return answer

        monkeypatch.setattr(script, form, noted)
    words += " --model_id model --height 16 --width 32 --num_runs 1 --seed 4 --dtype float32"
    out = run(script, words)
    assert ("Flax NNX" in out) == ("--flax" in words) and "mesh dp 1, sp 8, tp 1; " in out
    for shape in shapes:
        assert f"code {shape}, float32" in out
    assert out.count("1 runs: mean") == len(shapes)
    found = [float(error) for error in re.findall(r"relative (\S+)", out)]
    assert len(found) == (len(shapes) if "--compare" in words else 0) and all(error < 1e-5 for error in found)
    if "--profile" in words:
        assert profile.measured(Path("trace/decode"))["modules"][0]["component"] == "vae"
    if "--enable_tiling" in words:
        vae.enable_tiling()
    with torch.no_grad():
        for one, entry, x, answer in calls:
            assert one.use_tiling == vae.use_tiling
            theirs = vae.encode(x).latent_dist.mode() if entry == "encode" else vae.decode(x).sample
            assert relative(answer, theirs) < 1e-5


def test_default_models_are_published():
    names = {load(HUNYUAN).MODEL + task for task in ("t2v", "i2v")}
    names |= {load(DIT).MODEL.format(size) for size in ("480p", "720p")}
    assert names | {load(COG).MODEL, load(COG_VAE).MODEL, *load(COG_DIT).MODELS.values()} <= MODELS.keys()
