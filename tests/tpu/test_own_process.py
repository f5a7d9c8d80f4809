"""Scripts in processes of their own, with everything at its default. Oracle: upstream in the same process, or what the first process found."""

import json
from pathlib import Path

import pytest

from conftest import ROOT, run_python


pytestmark = pytest.mark.slow


@pytest.fixture
def ran(tmp_path):
    """A function from a script, its arguments and the environment to what it prints, run in a folder of its own."""

    def run(script: str, *arguments, devices: int = 2, **environment) -> str:
        common = {"DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": str(devices)}
        common["DIFFUSERS_TPU_CACHE"] = str(tmp_path / "cache")
        return run_python("-c", script, *arguments, cwd=tmp_path, timeout=600, **common | environment).stdout

    return run


PIPELINE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import tiny
from diffusers.models.attention import BasicTransformerBlock

def run(pipe):
    generator = torch.Generator().manual_seed(3)
    return pipe("a red cat", height=64, width=64, num_inference_steps=2, output_type="np", generator=generator).images

STRENGTH = 1.0
class Processor:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **more):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (to(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for to, x in
                   ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context)))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return attn.to_out[0](out * STRENGTH)

class Halved(BasicTransformerBlock):
    def forward(self, hidden_states, *args, **kwargs):
        pairs = hidden_states.unflatten(1, (-1, 2)).mean(2)
        return super().forward(pairs, *args, **kwargs).repeat_interleave(2, 1)

def swapped(cls, other):
    for pipe in pipes:
        for m in pipe.unet.modules():
            if type(m) is cls: m.__class__ = other

pipes = tiny.sd(safety_checker=None), tiny.sd(safety_checker=None).to("cuda")
def differ(name):
    theirs, ours = map(run, pipes)
    pictures.append(theirs)
    print("apart", name, float(abs(ours - theirs).max()))
pictures = []
differ("plain")
swapped(BasicTransformerBlock, Halved)
differ("swapped")
swapped(Halved, BasicTransformerBlock)
for pipe in pipes: pipe.unet.set_attn_processor(Processor())
differ("processor")
STRENGTH = 0.2
differ("global")
print("seen", *(float(abs(a - b).max()) > 1e-3 for a, b in zip(pictures, pictures[1:])))
"""


@pytest.mark.parametrize("devices, mesh", [(1, None), (2, "1,2,1"), (4, "2,2,1")])
def test_a_pipeline_whose_blocks_and_processors_change(ran, devices, mesh):
    given = {} if mesh is None else {"DIFFUSERS_TPU_MESH": mesh}
    printed = ran(PIPELINE, Path(__file__).parent, devices=devices, **given)
    apart = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("apart")]
    assert len(apart) == 4 and max(apart) < 1e-4, printed
    assert "seen True True True" in printed


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
