"""Gradients of compiled models. Oracle: torch's own of upstream's model, in the same process, same weights and inputs."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import denoisers
import test_vae
import tiny
from conftest import relative, slow
from diffusers import WanTransformer3DModel, tpu
from diffusers.tpu.common.config import TPUConfig
from diffusers.tpu.pipelines.attach import runs


LIMIT = 1e-4  # of all gradients of a kind together: a single one may be a difference of almost equal numbers


def asking(given: dict) -> dict:
    """A copy of the arguments, of which hidden states and samples ask for gradients, as they do in training."""
    return {
        name: x.clone().requires_grad_()
        if name.endswith(("hidden_states", "sample", "z"))
        else tree_map_only(torch.Tensor, torch.clone, x)
        for name, x in given.items()
    }


def gradients(model, given: dict, call=None) -> tuple[dict, dict]:
    """Of a fixed sum of the outputs' squares: by the arguments' numbers, and by parameters' names."""
    given = asking(given)
    output = (call or model)(**given)
    loss = sum((x.float() ** 2).mean() for x in tree_leaves(tuple(output)) if isinstance(x, torch.Tensor))
    loss.backward()
    tensors = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
    return (
        {n: t.grad for n, t in enumerate(tensors) if t.grad is not None},
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    )


def assert_alike(found: tuple[dict, dict], expected: tuple[dict, dict]):
    for ours, theirs in zip(found, expected):
        assert {*ours} >= {*theirs} and theirs
        assert not any(ours[name].any() for name in {*ours} - {*theirs})  # of what the output does not depend on
        assert all(ours[name].dtype == theirs[name].dtype for name in theirs)
        flat = [torch.cat([some[name].double().flatten() for name in theirs]) for some in (ours, theirs)]
        assert relative(*flat) < LIMIT


@pytest.mark.parametrize(
    "kind, mesh, batch, heads, training, again",
    [
        ("flux", (2, 2, 2), 2, 4, True, False),
        ("sd3.5", (1, 8, 1), 1, 3, True, True),
        ("qwen", (1, 4, 1), 1, 3, False, False),
        ("cogvideox 1.5 image", (1, 4, 2), 2, 6, True, True),
        ("hunyuan", (2, 2, 2), 2, 2, True, True),
        ("ltx", (1, 1, 1), 1, 4, False, False),
        slow("flux2", (1, 2, 4), 1, 4, True, True),
        slow("flux", (1, 1, 1), 1, 4, True, False),
    ],
)
def test_gradients_of_denoisers(chips, kind, mesh, batch, heads, training, again):
    """`again`: with upstream's gradient checkpointing."""
    theirs, given = denoisers.built(kind, heads).train(training), denoisers.inputs(kind, batch)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh))
    if again:
        ours.enable_gradient_checkpointing(), theirs.enable_gradient_checkpointing()
    assert_alike(gradients(ours, given), gradients(theirs, given))
    assert not tpu.report(ours)["eager"]
