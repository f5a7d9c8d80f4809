"""Oracle: upstream with the same cache. What its hooks decide and keep from step to step is what they decide and keep there."""

import numpy as np
import pytest
import torch

import tiny_wan
from conftest import relative
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.tpu import TPUConfig, install


STEPS = 5


def pyramid(pipe):
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: pipe.current_timestep,
    )  # fmt: skip


CACHES = {
    "first block": lambda pipe: FirstBlockCacheConfig(threshold=0.3),
    "pyramid attention": pyramid,
    "magnitudes": lambda pipe: MagCacheConfig(
        mag_ratios=torch.ones(STEPS), num_inference_steps=STEPS, threshold=0.5, max_skip_steps=2, retention_ratio=0.2
    ),
    "taylor": lambda pipe: TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=1,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r"blocks\.\d+\.attn\d"],
    ),
}


@pytest.fixture
def pipes():
    return [tiny_wan.build("t2v") for _ in range(2)]


@pytest.mark.idiom("caches")
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 4, 1), marks=pytest.mark.slow)], ids=str)
def test_a_cache_enabled_after_a_first_call_and_disabled_again(chips, pipes, mesh, name):
    theirs, ours = pipes
    install(ours, TPUConfig(mesh=mesh))
    runner = ours.transformer._tpu_runner
    inputs = {
        "prompt_embeds": torch.randn(1, 12, 32),
        "negative_prompt_embeds": torch.randn(1, 12, 32),
        **tiny_wan.arguments("t2v", prompt=None, output_type="latent", num_inference_steps=STEPS),
    }

    def call():
        with torch.no_grad():
            return [np.asarray(pipe(**inputs, **tiny_wan.fresh()).frames) for pipe in (theirs, ours)]

    plain, first = call()
    assert relative(first, plain) < 1e-5
    compiled = runner.compilations
    for pipe in (theirs, ours):
        pipe.transformer.enable_cache(CACHES[name](pipe))
    oracle, result = call()
    assert relative(result, oracle) < 1e-5
    assert relative(oracle, plain) > 1e-4  # the cache does something
    for pipe in (theirs, ours):
        pipe.transformer.disable_cache()
    oracle, result = call()
    assert relative(result, oracle) < 1e-5 and runner.compilations == compiled
