"""Oracle: upstream with the same guider. Branches that skip a layer are other programs, and only theirs."""

import copy

import pytest
import torch

import tiny
from conftest import programs_of, relative
from diffusers import LayerSkipConfig, SkipLayerGuidance
from diffusers.models.transformers.transformer_wan_flax import PLAN
from diffusers.tpu import bridge
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.config import TPUConfig


def skipping(**what):
    config = LayerSkipConfig(indices=[1], fqn="blocks", **{"skip_attention": False, "skip_ff": False, **what})
    always = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    return SkipLayerGuidance(guidance_scale=3.0, skip_layer_config=config, **always)


def guided(transformer, guider, x, prompts, step):
    """One step as upstream's pipelines make it: every branch prepares the model and cleans it up."""
    timestep = torch.tensor([500.0 - step], device=x.device)
    guider.set_state(step=step, num_inference_steps=2, timestep=timestep)
    state = guider.prepare_inputs({"encoder_hidden_states": prompts})
    for batch in state:
        guider.prepare_models(transformer)
        batch.noise_pred = transformer(x, timestep, batch.encoder_hidden_states, return_dict=False)[0]
        guider.cleanup_models(transformer)
    return guider(state)[0]


@pytest.mark.idiom("guidance")
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_three_branches_of_a_guider_side_by_side(make_mesh, dp):
    """The third skips a whole block, by a hook that is gone when its value is computed."""
    theirs = tiny.wan_transformer()
    ours = copy.deepcopy(theirs)
    runner = CompiledModule(ours, PLAN, make_mesh(dp, 2, 1), TPUConfig())
    runner.attach()
    env = bridge.environment()
    for what in ({"skip_attention": True, "skip_ff": True}, {"skip_ff": True}):
        guiders = [skipping(**what) for _ in range(2)]
        for step in range(2):
            x, prompts = torch.randn(1, 16, 2, 4, 6), tuple(torch.randn(1, 7, 32) for _ in range(2))
            with torch.no_grad():
                oracle = guided(theirs, guiders[0], x, prompts, step)
                with env.override_property(mesh=runner.mesh), env:
                    on_chips = tuple(env.moved(t) for t in (x, *prompts))
                    result = bridge.from_numpy(guided(ours, guiders[1], on_chips[0], on_chips[1:], step).jax())
            assert relative(result, oracle) < 1e-5, (what, step)
    assert programs_of(runner) == 3 and not runner.eager
