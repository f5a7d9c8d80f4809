"""examples/tpu/wan/generate_flax.py. Oracle: the guides' flags read by hand; upstream's frames of the same seed."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import relative
from diffusers import WanPipeline
from diffusers.tpu import TPUConfig


SCRIPT = Path(__file__).resolve().parents[2] / "examples/tpu/wan/generate_flax.py"
MODEL = SCRIPT.parents[1] / "models/wan-shapes"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("generate_flax", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFIGS = {
    "": TPUConfig(mesh=(2, 4, 1)),
    "--use_custom_attention --bqsize 3328 --bkvsize 2816 --bkvcomputesize 256": TPUConfig(
        mesh=(2, 4, 1), attention_blocks=(3328, 2816, 256)
    ),
    "--use_custom_attention False --use_k_smooth false": TPUConfig(
        mesh=(2, 4, 1), attention="splash", attention_smoothing=False
    ),
    "--use_dp False": TPUConfig(mesh=(1, 8, 1)),
    "--use_dp --sp_num 2": TPUConfig(mesh=(2, 4, 1), attention_ring=2),
    "--use_fsdp False": TPUConfig(mesh=(2, 1, 4)),
    "--use_fsdp False --sp_num 2 --use_dp False": TPUConfig(mesh=(1, 2, 4)),
}


@pytest.mark.parametrize("words", CONFIGS)
def test_flags_as_configuration(script, words):
    assert script.config_of(script.make_parser().parse_args(words.split()), 8) == CONFIGS[words]


BAD = {
    "--bqsize 256": "all of --bqsize, --bkvsize, --bkvcomputesize or none",
    "--bqsize 256 --bkvsize 256 --bkvcomputesize 100": "a divisor of those",
    "--sp_num 3": "that divide the 8 chips",
    "--use_dp perhaps": "expected True or False, got 'perhaps'",
    "--use_bf16": "unrecognized arguments",
    "--profile x --num_inference_steps 1": "more than 1 with --profile",
    "--output nowhere/x.mp4": "a folder that is there",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_flags_are_refused_before_anything_is_loaded(script, chips, monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_flax.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 2 and BAD[words] in capsys.readouterr().err


def test_without_a_tpu(script, monkeypatch, capsys):
    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    monkeypatch.setattr(sys, "argv", ["generate_flax.py"])
    with pytest.raises(SystemExit):
        script.main()
    assert "DIFFUSERS_TPU=cpu" in capsys.readouterr().err


def test_it_gives_upstreams_frames_and_a_trace(script, chips, monkeypatch, capsys, tmp_path):
    prompt = "a red circle moving right"
    words = f"--model_id {MODEL} --width 32 --height 48 --frames 5 --fps 8 --num_inference_steps 3 --guidance_scale 2"
    words += " --seed 6 --dtype float32 --flow_shift 2 --bqsize 256 --bkvsize 256 --bkvcomputesize 128 --profile trace"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_flax.py", "--prompt", prompt, *words.split()])
    written, export = [], script.export_to_video
    monkeypatch.setattr(
        script, "export_to_video", lambda frames, *a, **k: written.append(frames) or export(frames, *a, **k)
    )
    script.main()
    out = capsys.readouterr().out
    assert "mesh dp,sp,tp 2,4,1" in out and "reference" in out and "traced steps 2 to 3 into trace" in out
    assert Path("output.mp4").stat().st_size and list(Path("trace").rglob("*.xplane.pb"))

    monkeypatch.setenv("DIFFUSERS_TPU", "off")
    pipe = WanPipeline.from_pretrained(MODEL)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=2.0)
    theirs = pipe(
        prompt, height=48, width=32, num_frames=5, num_inference_steps=3, guidance_scale=2.0,
        generator=torch.Generator().manual_seed(6),
    ).frames[0]  # fmt: skip
    assert np.shape(theirs) == (5, 48, 32, 3)
    assert relative(written[0], theirs) < 1e-5  # 2e-6
