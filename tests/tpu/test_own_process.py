"""Scripts in processes of their own, with everything at its default. Oracle: upstream in the same process, or what the first process found."""

import json
import os
import subprocess
import sys

import pytest

import cards
from conftest import ROOT
from hub import Hub


pytestmark = pytest.mark.slow


@pytest.fixture
def ran(tmp_path):
    """A function from a script, its arguments and the environment to what it prints, run in a folder of its own."""

    def run(script: str, *arguments, **environment) -> str:
        env = {**os.environ, "DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": "2", "PYTHONPATH": str(ROOT / "src")}
        env |= {"DIFFUSERS_TPU_CACHE": str(tmp_path / "cache"), **environment}
        command = [sys.executable, "-c", script, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_a_card(ran, tmp_path):
    """Its sizes are its model's."""
    card = next(card for card in cards.CARDS if card.name == "stable_diffusion")
    hub = Hub(tmp_path / "hub")
    for name in cards.repositories(card.script()):
        hub.lay(name)
    ran(card.script() + 'image.save("astronaut.png")\n', HF_HUB_CACHE=str(hub.cache), HF_HUB_OFFLINE="1")
    assert (tmp_path / "astronaut.png").stat().st_size


SECOND = """
import json, sys
import jax
hits = {"cache_misses": 0}
def count(event, **_):
    hits[event.split("/")[-1]] = hits.get(event.split("/")[-1], 0) + 1
jax.monitoring.register_event_listener(count)
import torch
import diffusers.tpu
from diffusers import WanPipeline
pipe = WanPipeline.from_pretrained(sys.argv[1]).to("cuda")
video = pipe("a red circle moving right", height=32, width=32, num_frames=5, num_inference_steps=3, guidance_scale=2.0,
             generator=torch.Generator().manual_seed(0), output_type="np").frames
found = diffusers.tpu.report(pipe)["components"].values()
print(json.dumps({"traces": sum(c["traces"] for c in found), "misses": hits["cache_misses"],
                  "calls": sum(p["calls"] for c in found for p in c["programs"]), "video": float(abs(video).sum())}))
"""


def test_a_run_uses_what_compile_made_and_the_next_compiles_nothing(ran):
    model = ROOT / "examples/tpu/models/wan-shapes"
    sizes = "--height 32 --width 32 --num-frames 5 --num-inference-steps 3 --guidance-scale 2".split()
    line = "from diffusers.tpu.apps.cli import main; import sys; sys.exit(main())"
    made = ran(line, "compile", model, "--topology", "simulated", "--dtype", "float32", *sizes, "--json")
    names = {program["name"] for program in json.loads(made)["programs"]}
    assert names == {"text_encoder.forward", "transformer.forward", "vae.decode"}
    first, second = (json.loads(ran(SECOND, model).splitlines()[-1]) for _ in range(2))
    assert first["traces"] == second["traces"] == 0 and second["calls"] >= 5
    assert first["misses"] > 0 and second["misses"] == 0
    assert first["video"] == second["video"]
