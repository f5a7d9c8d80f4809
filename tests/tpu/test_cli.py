"""The command line. Oracle: exit statuses and files by hand; for the example script, upstream's frames of the same seed."""

import os
import re
import runpy
import sys

import pytest
import torch
from PIL import Image

import diffusers.utils
import tiny
from conftest import relative, slow
from diffusers import WanImageToVideoPipeline, WanPipeline, tpu
from diffusers.tpu.apps.cli import arguments, env, main, session
from diffusers.tpu.apps.cli.output import say


CALL = "--height 32 --width 48 --num-frames 5 --num-inference-steps 3 --prompt".split() + [tiny.WORDS]


def test_a_line_is_printed_as_it_is(capsys):
    """Brackets of a prompt are no markup."""
    say("a [red] circle [/b]")
    assert capsys.readouterr().out == "a [red] circle [/b]\n"


BAD = {
    "--prompt x": "DIFFUSERS_TPU=cpu",
    "--prompt x --device tpu": "expected a TPU",
    "--prompt x --device simulated --mesh 2,4": "expected a mesh",
    "--prompt x --device upstream --mesh 1,1,1": "no --mesh",
    "--prompt x --device upstream --height tall": "of type int, got 'tall'",
    "--device upstream --guidance-scale-2": "a value after --guidance-scale-2",
    "--prompt x --device upstream --latents 3": "no",
    "--prompt x --device upstream --image x.png": "picture",
    "--prompt x --device upstream --output x.avi": ".mp4 or .png",
    "--device upstream": "Provide either `prompt`",
    "--prompt x --device upstream --height 33": "divisible by 16",
    "--prompt x --device upstream --linear int8": "no --linear",
    "--prompt x --device upstream --fps 0": "--fps of at least 1",
    "--prompt x --device upstream --seed 99999999999999999999": "--seed of at least 0",
    "--prompt x --device upstream --num-inference-steps 0": "num_inference_steps of at least 1",
    "--prompt x --device upstream --guidance-scale nan": "to be finite",
    "--prompt x --device simulated --stage text --profile d": "--profile of a whole run",
    "plan wan2.1-t2v-14b --topology ,": "expected a topology",
    "compile wan2.1-t2v-14b --topology simulated --output /etc/hostname": "write into /etc/hostname",
    "bench attention --json /nodir/rows.json": "a writable folder",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_and_status_2(bare, wan_folder, capsys, words):
    """Further rows in test_faults.py."""
    capsys.readouterr()
    assert main([*(["generate", wan_folder] if words.startswith("-") else []), *words.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("diffusers-tpu: ") and BAD[words] in error
    assert not list(bare.rglob("*.mp4"))


def test_upstreams_device_is_torchs_and_no_idioms(chips):
    there = torch.cuda.is_available()
    tpu.activate()
    assert torch.cuda.is_available() and session.choose_target("upstream") is None
    assert torch.cuda.is_available() == there


def test_nonsense_in_the_environment_is_refused_with_the_list(bare, wan_folder, capsys, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU", "nonsense")
    for words in (["env"], ["generate", wan_folder, *CALL]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(mode in error for mode in ("auto", "off", "cpu", "nonsense"))


def test_an_error_that_nobody_worded_keeps_its_traceback(bare, wan_folder, monkeypatch):
    """A ValueError from outside of the package, and one of a builtin, at a line of the package that raises none itself."""

    def fails(*args, **kwargs):
        raise ValueError("inside")

    monkeypatch.setattr(WanPipeline, "encode_prompt", fails)
    with pytest.raises(ValueError, match="inside"):
        main(["generate", wan_folder, *CALL, "--device", "upstream"])
    monkeypatch.setattr(env, "version", int)
    with pytest.raises(ValueError, match="invalid literal"):
        main(["env"])


def test_env_and_generate_on_simulated_chips(bare, chips, wan_folder, capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "8, simulated on the CPU" in out and "2,4,1" in out and "attention" in out
    assert ("torch is built for CUDA" in out) == bool(torch.version.cuda)
    assert main(["generate", wan_folder, *CALL, "--mesh", "2,4,1", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    parts = ("load", "compile transformer", "compile vae.decode", "text encode", "first step", "VAE decode", "total")
    assert all(part in out for part in parts)
    assert "mesh dp 2, sp 4, tp 1; 8 chips simulated on the CPU: these are not TPU times" in out
    assert sorted(os.listdir("out")) == ["a-red-circle-moving-left.mp4", "a-red-circle-moving-left.png"]
    with Image.open("out/a-red-circle-moving-left.png") as sheet:
        assert sheet.size == (5 * 130 - 2, 85)


def test_env_says_how_the_cuda_build_of_torch_is_replaced(chips, capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["env"]) == 0 and env.CUDA_BUILD in capsys.readouterr().out
    monkeypatch.setenv("DIFFUSERS_TPU", "off")  # a GPU's host may need it
    assert main(["env"]) == 0 and env.CUDA_BUILD not in capsys.readouterr().out


def test_arguments_follow_the_signature():
    given = {"prompt": ["a", "b"], "height": ["32"], "guidance_scale": ["2"], "num_frames": ["5"]}
    expected = {"prompt": ["a", "b"], "height": 32, "guidance_scale": 2.0, "num_frames": 5}
    assert arguments.call_arguments(WanPipeline, given) == expected
    with pytest.raises(ValueError, match="needs --image"):
        arguments.require(WanImageToVideoPipeline, ["prompt"])
    with pytest.raises(ValueError, match="WanPipeline takes no --image"):
        arguments.require(WanPipeline, ["image"])


@pytest.mark.parametrize("name", ["text_to_video", slow("image_to_video")])
def test_an_example_gives_upstreams_frames(chips, root, wan_folder, tmp_path, monkeypatch, name):
    script = root / f"examples/tpu/wan/{name}.py"
    more = []
    if name == "image_to_video":
        tiny.picture(40, 40).save(tmp_path / "first.png")
        tiny.make("wan_i2v").save_pretrained(wan_folder := str(tmp_path))
        more = ["--image", f"{tmp_path}/first.png"]
    assert not re.search(r"\b(tpu|jax|torchax)\b", script.read_text(), re.IGNORECASE)
    videos = {}
    monkeypatch.setattr(diffusers.utils, "export_to_video", lambda frames, path, fps: videos.update({path: frames}))
    for mode, device in (("cpu", "cuda"), ("off", "cpu")):
        monkeypatch.setenv("DIFFUSERS_TPU", mode)
        words = ["--model", wan_folder, "--output", mode, *CALL, *more, "--dtype", "float32", "--device", device]
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        runpy.run_path(str(script), run_name="__main__")
    assert videos["cpu"].shape == (5, 32, 48, 3)
    assert relative(videos["cpu"], videos["off"]) < 1e-4  # 5e-7
