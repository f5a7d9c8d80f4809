"""Stages and their files. Oracle: the same call in one run, to the last bit."""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import tiny
from conftest import assert_same, slow
from diffusers import AutoencoderKLWan, DiffusionPipeline, UniPCMultistepScheduler, tpu
from diffusers.tpu.apps import stages
from diffusers.tpu.apps.cli import main
from diffusers.tpu.apps.stages.file import METADATA
from diffusers.tpu.apps.stages.loading import components_of


SEED = 3
WEIGHTS = "*.safetensors"
CALL = ["--prompt", "a red circle", *"--height 32 --width 48 --num-frames 5 --num-inference-steps 3 --seed 3".split()]
CALL += "--guidance-scale 4 --max-sequence-length 24 --dtype bfloat16".split()
INPUTS = {"denoise": ["--input", "t.safetensors"], "decode": ["--input", "l.safetensors"]}
OUTPUTS = {None: "one.mp4", "text": "t.safetensors", "denoise": "l.safetensors", "decode": "three.mp4"}


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    tiny.short_texts(monkeypatch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function from a builder's name to a directory with that pipeline, and its call."""
    made = {}

    def save(name: str):
        if name not in made:
            pipe, call = tiny.staged(name)
            folder = tmp_path_factory.mktemp(name)
            pipe.save_pretrained(folder)
            made[name] = str(folder), call
        folder, call = made[name]
        return folder, dict(call)

    return save


def one_run(folder: str, call: dict, dtype) -> np.ndarray:
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe(**call, generator=torch.Generator().manual_seed(SEED), output_type="np").frames


def three_runs(folder: str, call: dict, dtype, place: Path) -> np.ndarray:
    """The frames of three stages, all that they hand on read back from files."""
    tensors = {}
    packed = {name: stages.pack(f"call.{name}", value, tensors) for name, value in call.items()}
    settings = stages.Settings("text", folder, stages.fingerprint(folder), "any", None, SEED, packed)
    pipe = stages.load(folder, "text", dtype)
    stages.save(place / "text.safetensors", settings, {**tensors, **stages.run_text(pipe, call, SEED)})
    settings, tensors = stages.read(place / "text.safetensors", "text")
    call = {name: stages.unpack(value, tensors) for name, value in settings.call.items()}
    latents = stages.run_denoise(stages.load(folder, "denoise", dtype), call, settings.seed, tensors)
    settings = dataclasses.replace(settings, stage="denoise")
    stages.save(place / "latents.safetensors", settings, {stages.LATENTS: latents})
    _, tensors = stages.read(place / "latents.safetensors", "denoise")
    assert tensors[stages.LATENTS].dtype == dtype
    return stages.run_decode(stages.load(folder, "decode", dtype), tensors[stages.LATENTS])


FULL = ("first_frame_kept",)  # in float32 on the host
# Upstream's loop on device tensors and on host tensors, with a picture and two experts: the rest is slow.
CASES = [("bare", name, torch.float32 if name in FULL else torch.bfloat16) for name in tiny.STAGED]
CASES += [("chips", "image_to_video_two_experts", torch.float32), slow("chips", "text_to_video", torch.bfloat16)]
CASES += [slow("chips", name, torch.float32) for name in tiny.STAGED if name != "image_to_video_two_experts"]


@pytest.mark.parametrize("where, name, dtype", CASES)
def test_three_stages_give_what_one_run_gives(request, saved, tmp_path, where, name, dtype):
    request.getfixturevalue(where)
    folder, call = saved(name)
    call |= {"num_inference_steps": 2} if where == "chips" else {}
    frames = one_run(folder, call, dtype)
    assert frames.std() > 0.05
    np.testing.assert_array_equal(three_runs(folder, call, dtype, tmp_path), frames)
    assert ("_tpu" in vars(stages.load(folder, "decode", dtype))) == tpu.is_active() == (where == "chips")


def test_a_stage_needs_no_weights_of_another(bare, saved):
    folder, call = saved("image_to_video")
    frames = one_run(folder, call, torch.float32)
    cls = type(stages.load(folder, "decode"))
    for stage in stages.STAGES:
        lean = bare / stage
        shutil.copytree(folder, lean)
        for file in lean.rglob(WEIGHTS):
            if file.parent.name not in components_of(cls, stage):
                file.unlink()
    kept = stages.run_text(stages.load(str(bare / "text"), "text"), call, SEED)
    latents = stages.run_denoise(stages.load(str(bare / "denoise"), "denoise"), call, SEED, kept)
    np.testing.assert_array_equal(stages.run_decode(stages.load(str(bare / "decode"), "decode"), latents), frames)
    assert "vae" not in components_of(type(tiny.wan()), "text")  # where no pixels are encoded


def test_guidance_that_the_text_stage_did_not_encode_for(bare, saved):
    folder, call = saved("hunyuan_text_to_video")
    pipe = stages.load(folder, "text")
    pipe.guider = pipe.guider.new(enabled=False)
    kept = stages.run_text(pipe, call, SEED)
    with pytest.raises(ValueError, match="its guidance was another"):
        stages.run_denoise(stages.load(folder, "denoise"), call, SEED, kept)


# The command line


def command(model: str, stage: str | None, *words: str, call: list[str] = CALL) -> int:
    given = ["--stage", stage] if stage else []
    given += ["--output", OUTPUTS[stage], "--device", "upstream", *INPUTS.get(stage, call)]
    return main(["generate", model, *given, *words])


@pytest.fixture(scope="module")
def wan(saved) -> str:
    return saved("text_to_video")[0]


@pytest.fixture(scope="module")
def finished(wan, tmp_path_factory) -> Path:
    """A folder with the video of one run and the files of all stages."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        assert [command(wan, stage) for stage in (None, *stages.STAGES)] == [0, 0, 0, 0]
    return folder


def test_three_commands_write_the_video_of_one(finished, capsys):
    assert (finished / "one.mp4").read_bytes() == (finished / "three.mp4").read_bytes()
    assert (finished / "one.png").read_bytes() == (finished / "three.png").read_bytes()
    settings, tensors = stages.read(finished / "l.safetensors", "denoise")
    found = settings.seed, settings.dtype, settings.call["height"], list(settings.ran)
    assert found == (3, "bfloat16", 32, ["text", "denoise"])
    assert tensors["latents"].dtype == torch.bfloat16 and tensors["latents"].shape == (1, 16, 2, 4, 6)


def test_a_flag_that_repeats_the_file_is_fine_and_a_stage_that_ran_elsewhere_is_named(bare, finished, wan, capsys):
    shutil.copy(finished / "t.safetensors", bare)
    assert command(wan, "denoise", "--height", "32", "--seed", "3", "--num-videos-per-prompt", "1") == 0
    assert Path("l.safetensors").read_bytes() == (finished / "l.safetensors").read_bytes()
    assert "last bits" not in capsys.readouterr().out
    _rewritten(bare / "t.safetensors", ran={"text": "mesh dp 1, sp 8, tp 1"})
    assert command(wan, "denoise") == 0
    assert "stage text ran on mesh dp 1, sp 8, tp 1: the last bits may differ" in capsys.readouterr().out


# In the second step, in the decoder, while writing.
CUT = [("denoise", UniPCMultistepScheduler, "step", 2), ("decode", AutoencoderKLWan, "decode", 1)]
CUT += [("denoise", os, "replace", 1)]


@pytest.mark.parametrize("stage, owner, name, number", CUT)
def test_a_stage_cut_short_leaves_nothing_and_runs_again(bare, finished, wan, monkeypatch, stage, owner, name, number):
    for file in ("t.safetensors", "l.safetensors")[: stages.STAGES.index(stage)]:
        shutil.copy(finished / file, bare)
    before = {path.name: path.read_bytes() for path in bare.iterdir()}
    with monkeypatch.context() as patch:
        calls, original = [], getattr(owner, name)

        def stops(*args, **kwargs):
            calls.append(1)
            if len(calls) == number:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        patch.setattr(owner, name, functools.wraps(original)(stops))
        assert command(wan, stage) == 130
    assert {path.name: path.read_bytes() for path in bare.iterdir()} == before
    assert command(wan, stage) == 0
    assert Path(OUTPUTS[stage]).read_bytes() == (finished / OUTPUTS[stage]).read_bytes()


def _rewritten(path: Path, tensors=None, **changes):
    """The file with other metadata."""
    with safetensors.safe_open(path, "pt") as file:
        settings = json.loads(file.metadata()[METADATA])
    tensors = safetensors.torch.load_file(path) if tensors is None else tensors
    safetensors.torch.save_file(tensors, path, {METADATA: json.dumps({**settings, **changes})})


SPOILT = {  # what is said, how
    "to be a whole file of the stage text": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "a whole file of the stage text": lambda path: path.write_text("a video"),
    "safetensors that no stage wrote": lambda path: safetensors.torch.save_file({"x": torch.ones(1)}, path),
    "embeddings of an earlier script's first stage": lambda path: safetensors.torch.save_file(
        {"prompt_embeds": torch.ones(1)}, path
    ),
    "of format 1, got 2; run the stage text again": lambda path: _rewritten(path, format=2),
    "got 0.41.0; run the stage text again": lambda path: _rewritten(path, package="0.41.0"),
    "of stage text, got denoise": lambda path: _rewritten(path, stage="denoise"),
    "whose configuration is another": lambda path: _rewritten(path, fingerprint="0"),
    "to hold": lambda path: _rewritten(path, colour="red"),
    "it was changed": lambda path: _rewritten(path, {"prompt_embeds": torch.ones(1, 3, 32, dtype=torch.bfloat16)}),
}


@pytest.mark.parametrize("expected", SPOILT)
def test_a_spoilt_file_is_refused(bare, finished, wan, capsys, expected):
    shutil.copy(finished / "t.safetensors", bare)
    SPOILT[expected](bare / "t.safetensors")
    Path("l.safetensors").write_text("what was there")
    assert command(wan, "denoise") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("diffusers-tpu: expected") and expected in error
    assert Path("l.safetensors").read_text() == "what was there"


BAD = [  # stage, words, what is said
    ("denoise", "--height 48", "expected --height as in t.safetensors, 32, got 48"),
    ("denoise", "--num-videos-per-prompt 2", "1, got 2"),
    ("denoise", "--seed 4", "expected --seed as in t.safetensors, 3, got 4"),
    ("decode", "--prompt blue", "expected --prompt as in l.safetensors"),
    ("decode", "--dtype float32", "expected --dtype as in l.safetensors, 'bfloat16'"),
    ("text", "--input t.safetensors", "no --input of the stage text"),
    (None, "--input t.safetensors", "expected --stage denoise or decode"),
    ("denoise", "--fps 8", "expected --fps at the stage decode"),
    ("denoise", "--output t.safetensors", "another file than --input"),
    ("denoise", "--output l.mp4", "to end in .safetensors"),
]


@pytest.mark.parametrize("stage, words, expected", BAD)
def test_bad_input_is_one_line_and_status_2(bare, finished, wan, capsys, stage, words, expected):
    for file in ("t.safetensors", "l.safetensors"):
        shutil.copy(finished / file, bare)
    before = {path.name: path.read_bytes() for path in bare.iterdir()}
    words = [*words.split(), *INPUTS.get(stage, CALL), *(["--stage", stage] if stage else [])]
    assert main(["generate", wan, "--device", "upstream", *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("diffusers-tpu: ") and expected in error
    assert {path.name: path.read_bytes() for path in bare.iterdir() if path.is_file()} == before


def test_a_stage_without_its_input_and_pipelines_without_stages(bare, wan, capsys):
    assert main(["generate", wan, "--stage", "decode", "--device", "upstream"]) == 2
    assert "the file that the stage denoise wrote" in capsys.readouterr().err
    tiny.flux().save_pretrained("flux")
    assert main(["generate", "flux", "--stage", "text", "--prompt", "x", "--device", "upstream"]) == 2
    assert "expected a pipeline that can run in stages" in capsys.readouterr().err


def test_a_fingerprint_is_of_settings_and_not_of_versions(saved, tmp_path):
    folder, _ = saved("hunyuan_text_to_video")
    shutil.copytree(folder, tmp_path / "model")
    files = {"transformer/config.json": {"qk_norm": "x"}, "guider/guider_config.json": {"guidance_scale": 2.0}}
    for file, change in files.items():
        config = tmp_path / "model" / file
        kept = config.read_text()
        for changes, same in (({"_diffusers_version": "0.1"}, True), (change, False)):
            config.write_text(json.dumps({**json.loads(kept), **changes}))
            assert (stages.fingerprint(str(tmp_path / "model")) == stages.fingerprint(folder)) == same
        config.write_text(kept)


def test_the_picture_goes_with_the_file(bare, saved, capsys):
    model = saved("first_frame_kept")[0]
    tiny.picture(32, 48, 1).save("a.png")
    tiny.picture(32, 48, 2).save("b.png")
    assert command(model, None, "--image", "a.png") == 0
    assert command(model, "text", "--image", "a.png") == 0
    assert command(model, "denoise", "--image", "b.png") == 2
    assert "expected --image as in t.safetensors, the picture" in capsys.readouterr().err
    Path("a.png").rename("c.png")
    assert command(model, "denoise", "--image", "c.png") == 0
    assert command(model, "decode") == 0
    assert Path("one.mp4").read_bytes() == Path("three.mp4").read_bytes()


def test_arguments_go_through_a_file_unchanged(tmp_path):
    values = [
        [1, 2.5, -0.1, None, True, "word"], torch.randn(2, 0, 3, dtype=torch.bfloat16), torch.tensor(3.5),
        np.arange(6, dtype=np.uint8).reshape(2, 3), [[tiny.picture(3, 5, 1)], [tiny.picture(2, 4, 2, "L")]],
    ]  # fmt: skip
    tensors = {}
    packed = json.loads(json.dumps(stages.pack("call", values, tensors)))
    again = stages.unpack(packed, safetensors.torch.load(safetensors.torch.save(tensors)))
    assert again[0] == values[0] and again[4] == values[4]  # pictures by their modes and pixels
    assert_same(again[1:3], values[1:3])
    np.testing.assert_array_equal(again[3], values[3])
    for value in (print, {"scale": 1.0}, tiny.picture(32, 48, 1, mode="CMYK")):
        with pytest.raises(TypeError, match="a stage file cannot hold it"):
            stages.pack("call", value, {})


def test_latents_of_another_vae(bare, wan):
    pipe = stages.load(wan, "decode")
    for latents in (torch.zeros(1, 16, 2, 4, 6, dtype=torch.bfloat16), torch.zeros(1, 48, 2, 4, 6)):
        with pytest.raises(ValueError, match="expected latents of dtype and channels"):
            stages.run_decode(pipe, latents)
