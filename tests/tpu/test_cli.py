"""The command line. Oracle: exit statuses and files by hand; for the example script, upstream's frames of the same seed."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

import diffusers.tpu.chips.devices
import diffusers.utils
import tiny
from conftest import relative
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.tpu.apps.cli import arguments, main
from diffusers.tpu.apps.cli.errors import BadInput
from diffusers.tpu.apps.generation import media


CALL = ["--prompt", "a red circle moving left", "--height", "32", "--width", "48", "--num-frames", "5"]
CALL += ["--num-inference-steps", "3"]
RUN = "import sys; from diffusers.tpu.apps.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A directory with a tiny Wan in it."""
    folder = tmp_path_factory.mktemp("model")
    tiny.wan().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A host without a TPU and without settings; the working directory is empty."""
    monkeypatch.setenv("DIFFUSERS_TPU", "auto")
    monkeypatch.setattr(diffusers.tpu.chips.devices, "_generation_on_this_host", lambda: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(root, **changes) -> dict:
    return {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", **changes}


BAD = {
    "no TPU": (["--prompt", "x"], "DIFFUSERS_TPU=cpu"),
    "unknown device": (["--prompt", "x", "--device", "gpu"], "simulated"),
    "a TPU where none is": (["--prompt", "x", "--device", "tpu"], "expected a TPU"),
    "mesh of two": (["--prompt", "x", "--device", "simulated", "--mesh", "2,4"], "expected a mesh"),
    "mesh too large": (["--prompt", "x", "--device", "simulated", "--mesh", "3,9,1"], "at most the 8 chips"),
    "mesh without the path": (["--prompt", "x", "--device", "upstream", "--mesh", "1,1,1"], "no --mesh"),
    "unknown argument": (["--prompt", "x", "--device", "upstream", "--sharpness", "3"], "takes no --sharpness"),
    "word for a number": (["--prompt", "x", "--device", "upstream", "--height", "tall"], "of type int, got 'tall'"),
    "no value": (["--device", "upstream", "--guidance-scale-2"], "a value after --guidance-scale-2"),
    "tensor argument": (["--prompt", "x", "--device", "upstream", "--latents", "3"], "no"),
    "image for text-to-video": (["--prompt", "x", "--device", "upstream", "--image", "x.png"], "picture"),
    "other suffix": (["--prompt", "x", "--device", "upstream", "--output", "x.avi"], ".mp4 or .png"),
    "folder that is a file": (["--prompt", "x", "--device", "upstream", "--output", "/dev/null/x.mp4"], "/dev/null"),
    "no prompt": (["--device", "upstream"], "Provide either `prompt`"),
    "size that 16 does not divide": (["--prompt", "x", "--device", "upstream", "--height", "33"], "divisible by 16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(bare, model, capsys, name):
    words, expected = BAD[name]
    capsys.readouterr()
    assert main(["generate", model, *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("diffusers-tpu: ") and expected in error
    assert not list(bare.rglob("*.mp4"))


def test_bad_models(bare, model, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (bare / "empty").mkdir()
    broken = bare / "broken"
    subprocess.run(["cp", "-r", model, broken], check=True)
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    expected = {
        "empty": "no file named model_index.json",
        "broken": "no file named diffusion_pytorch_model",
        "not/a/folder": "there is no such directory",
    }
    for name, message in expected.items():
        assert main(["generate", name, "--prompt", "x", "--device", "upstream"]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_nonsense_in_the_environment_is_refused_with_the_list(bare, model, capsys, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU", "nonsense")
    for words in (["env"], ["generate", model, "--prompt", "x"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(mode in error for mode in ("auto", "off", "cpu", "nonsense"))


def test_an_error_of_our_own_keeps_its_traceback(bare, model, monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("inside")

    monkeypatch.setattr(WanPipeline, "encode_prompt", fails)
    with pytest.raises(ValueError, match="inside"):
        main(["generate", model, *CALL, "--device", "upstream"])


def test_generate_on_simulated_chips(chips, bare, model, capsys, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU", "cpu")
    assert main(["generate", model, *CALL, "--mesh", "2,4,1", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    for part in (
        "load",
        "compile transformer",
        "compile vae.decode",
        "text encode",
        "first step",
        "VAE decode",
        "total",
    ):
        assert part in out
    assert "mesh dp 2, sp 4, tp 1; 8 chips simulated on the CPU: these are not TPU times" in out
    assert sorted(os.listdir("out")) == ["a-red-circle-moving-left.mp4", "a-red-circle-moving-left.png"]
    with Image.open("out/a-red-circle-moving-left.png") as sheet:
        assert sheet.size == (5 * 130 - 2, 85)


def test_a_writer_that_fails_leaves_nothing(bare, model, monkeypatch):
    def half(frames, path, fps):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(media, "export_to_video", half)
    (bare / "kept.mp4").write_text("an earlier video")
    assert main(["generate", model, *CALL, "--device", "upstream", "--output", "kept.mp4"]) == 130
    assert os.listdir() == ["kept.mp4"] and Path("kept.mp4").read_text() == "an earlier video"


# Imports once, then runs each command line that it reads in a process of its own, and says how that ended.
RUNS = """
import json, os, signal, sys, time
from pathlib import Path
from transformers import UMT5EncoderModel
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.tpu.apps.cli import main
from diffusers.tpu.apps.generation import media
def half(frames, path, fps):
    Path(path).write_bytes(b"half")
    print("WRITING", file=sys.stderr, flush=True)
    time.sleep(60)
media.export_to_video = half
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    child = os.fork()
    if not child:
        sys.exit(main(json.loads(line)))
    print(child, file=answers, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def runs(root):
    process = subprocess.Popen(
        [sys.executable, "-c", RUNS],
        env=environment(root),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    yield process
    process.communicate(timeout=60)


@pytest.mark.parametrize(
    "steps, moment, number, status",
    [
        ("1", b"WRITING", signal.SIGTERM, 143),
        ("1000000", b"it/s", signal.SIGINT, 130),
        ("1000000", b"it/s", signal.SIGTERM, -signal.SIGTERM),
    ],
    ids=["SIGTERM writing", "SIGINT denoising", "SIGTERM denoising"],
)
def test_an_interrupted_run_leaves_nothing(runs, model, tmp_path, steps, moment, number, status):
    words = ["generate", model, *CALL, "--device", "upstream", "--output", str(tmp_path / "x.mp4")]
    words[words.index("--num-inference-steps") + 1] = steps
    runs.stdin.write(json.dumps(words).encode() + b"\n")
    child, seen, deadline = int(runs.stdout.readline()), b"", time.monotonic() + 120
    while moment not in seen.split(b"Loading")[-1] and time.monotonic() < deadline:
        seen += os.read(runs.stderr.fileno(), 4096) or pytest.fail(seen.decode())
    os.kill(child, number)
    assert int(runs.stdout.readline()) == status
    assert os.listdir(tmp_path) == []


def test_env_without_a_tpu_imports_no_jax(root):
    code = RUN.replace(
        "sys.exit(main())", "main(['env', '--json']); print(sorted({'jax', 'torchax'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(root, DIFFUSERS_TPU="off"), capture_output=True, text=True
    )
    facts, _, imported = result.stdout.rpartition("}")
    facts = json.loads(facts + "}")
    assert imported.strip() == "[]"
    assert facts["chips"] == {"TPU path": "off: DIFFUSERS_TPU=off; plain diffusers runs"}
    assert facts["settings"]["DIFFUSERS_TPU"] == "off"
    listed = [line for line in (root / "patches/series").read_text().split() if line.endswith(".patch")]
    assert [name[:4] for name in listed] == list(facts["patches"])


def test_env_on_simulated_chips(chips, capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "8, simulated on the CPU" in out and "2,4,1" in out and "attention" in out


def test_arguments_follow_the_signature():
    given = {"prompt": ["a", "b"], "height": ["32"], "guidance_scale": ["2"], "num_frames": ["5"]}
    assert arguments.call_arguments(WanPipeline, given) == {
        "prompt": ["a", "b"],
        "height": 32,
        "guidance_scale": 2.0,
        "num_frames": 5,
    }
    with pytest.raises(BadInput, match="needs --image"):
        arguments.require(WanImageToVideoPipeline, ["prompt"])
    with pytest.raises(BadInput, match="WanPipeline takes no --image"):
        arguments.require(WanPipeline, ["image"])


def test_the_example_gives_upstreams_frames(chips, root, model, tmp_path, monkeypatch):
    script = root / "examples/tpu/wan/text_to_video.py"
    assert not re.search(r"\b(tpu|jax|torchax)\b", script.read_text(), re.IGNORECASE)
    videos = {}
    monkeypatch.setattr(diffusers.utils, "export_to_video", lambda frames, path, fps: videos.update({path: frames}))
    for mode, device in (("cpu", "cuda"), ("off", "cpu")):
        monkeypatch.setenv("DIFFUSERS_TPU", mode)
        words = ["--model", model, "--output", mode, *CALL, "--dtype", "float32", "--device", device]
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        runpy.run_path(str(script), run_name="__main__")
    assert videos["cpu"].shape == (5, 32, 48, 3)
    assert relative(videos["cpu"], videos["off"]) < 1e-4  # 5e-7
