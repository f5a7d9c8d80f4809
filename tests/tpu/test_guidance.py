"""Oracle: upstream with the same guider. Branches that skip a layer are other programs, and only theirs."""

import copy

import numpy as np
import pytest
import torch

import tiny
import tiny_wan
from conftest import relative
from diffusers import AutoGuidance, LayerSkipConfig, PerturbedAttentionGuidance, SkipLayerGuidance
from diffusers.models.transformers.transformer_wan_flax import PLAN
from diffusers.tpu import bridge
from diffusers.tpu.config import TPUConfig
from diffusers.tpu.runner import Runner


def skipping(fqn="transformer_blocks", **what):
    config = LayerSkipConfig(indices=[1], fqn=fqn, **{"skip_attention": False, "skip_ff": False, **what})
    always = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    return lambda: SkipLayerGuidance(guidance_scale=3.0, skip_layer_config=config, **always)


GUIDERS = {
    "skips a feed-forward": skipping(skip_ff=True),
    "skips attention": skipping(skip_attention=True),
    "perturbed attention": lambda: PerturbedAttentionGuidance(
        guidance_scale=3.0, perturbed_guidance_layers=[1], perturbed_guidance_start=0.0, perturbed_guidance_stop=1.0
    ),
    "a worse model's branch": lambda: AutoGuidance(
        guidance_scale=3.0, auto_guidance_layers=[0], auto_guidance_config=None, dropout=1.0
    ),
}


@pytest.mark.idiom("guidance")
def test_guiders_that_change_the_model_for_a_branch(chips):
    theirs, ours = tiny.hunyuan15(), tiny.hunyuan15()
    plain = None
    ours.to("cuda")
    for name, make in GUIDERS.items():
        results = []
        for pipe in (theirs, ours):
            pipe.set_progress_bar_config(disable=True)
            pipe.guider = make()
            results.append(np.asarray(pipe(**tiny.arguments("hunyuan15", 2) | {"output_type": "latent"}).frames))
        assert relative(results[1], results[0]) < 1e-5, name
        assert plain is None or relative(results[0], plain) > 1e-4, name
        plain = results[0]
    assert not ours.transformer._tpu_runner.eager


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
    theirs = tiny_wan.transformer()
    ours = copy.deepcopy(theirs)
    runner = Runner(ours, PLAN, make_mesh(dp, 2, 1), TPUConfig())
    runner.attach()
    env = bridge.environment()
    for what in ({"skip_attention": True, "skip_ff": True}, {"skip_ff": True}, {"skip_attention_scores": True}):
        guiders = [skipping("blocks", **what)() for _ in range(2)]
        for step in range(2):
            x, prompts = torch.randn(1, 16, 2, 4, 6), [torch.randn(1, 7, 32) for _ in range(2)]
            with torch.no_grad():
                oracle = guided(theirs, guiders[0], x, prompts, step)
                with env.override_property(mesh=runner.mesh), env:
                    on_chips = [env.moved(t) for t in (x, *prompts)]
                    result = bridge.from_numpy(guided(ours, guiders[1], on_chips[0], on_chips[1:], step).jax())
            assert relative(result, oracle) < 1e-5, (what, step)
    assert runner.compilations == 4 and not runner.eager
