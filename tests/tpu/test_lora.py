"""Oracle: the same pipeline with the path off, the same LoRA calls in the same order. Every change is seen, and few compile."""

import copy

import numpy as np
import pytest
import torch

import tiny_wan
from conftest import relative
from diffusers.tpu import TPUConfig, install


LAYERS = ("attn1.to_q", "attn2.to_v", "ffn.net.2")


def weights(pipe, rank: int, seed: int, blocks=(0, 1, 2)) -> dict[str, torch.Tensor]:
    """A LoRA file's tensors for the transformer, large enough to be seen."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for block in blocks:
        for layer in LAYERS:
            out, inner = pipe.transformer.get_submodule(f"blocks.{block}.{layer}").weight.shape
            name = f"transformer.blocks.{block}.{layer}"
            found[f"{name}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) / inner**0.5
            found[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.5
    return found


def unload_after_fusing(pipe):
    pipe.fuse_lora()
    pipe.unload_lora_weights()


# (what a script does, how many executables of the transformer it may add)
SCRIPT = {
    "load": (lambda p, w: p.load_lora_weights(copy.copy(w[0]), adapter_name="a"), 1),
    "scale": (lambda p, w: p.set_adapters(["a"], [0.25]), 0),
    "scale of zero": (lambda p, w: p.set_adapters(["a"], [0.0]), 0),
    "scale below zero": (lambda p, w: p.set_adapters(["a"], [-1.5]), 0),
    "scale back": (lambda p, w: p.set_adapters(["a"], [1.0]), 0),
    "disable": (lambda p, w: p.disable_lora(), 1),
    "enable": (lambda p, w: p.enable_lora(), 0),
    "another": (lambda p, w: p.load_lora_weights(copy.copy(w[1]), adapter_name="b"), 1),
    "both": (lambda p, w: p.set_adapters(["a", "b"], [0.5, 2.0]), 1),
    "other scales of both": (lambda p, w: p.set_adapters(["a", "b"], [0.7, -0.3]), 0),
    "scales by block": (
        lambda p, w: p.set_adapters(["a", "b"], [{"transformer": 0.1}, 1.0]), 0
    ),
    "one of two": (lambda p, w: p.set_adapters("b"), 1),
    "fuse": (lambda p, w: p.fuse_lora(adapter_names=["b"], lora_scale=0.7), 1),
    "unfuse": (lambda p, w: p.unfuse_lora(), 1),
    "delete": (lambda p, w: p.delete_adapters("b"), 1),
    "set again": (lambda p, w: p.set_adapters("a"), 1),
    "hot-swap": (lambda p, w: p.load_lora_weights(copy.copy(w[2]), adapter_name="a", hotswap=True), 0),
    "fuse and unload": (lambda p, w: unload_after_fusing(p), 2),
    "load again": (lambda p, w: p.load_lora_weights(copy.copy(w[0]), adapter_name="a"), 1),
    "unload": (lambda p, w: p.unload_lora_weights(), 1),
}  # fmt: skip


@pytest.mark.idiom("lora")
@pytest.mark.parametrize("mesh", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 4, 1)], ids=str)
def test_a_session_with_loras(chips, mesh):
    pytest.importorskip("peft")
    theirs, ours = (tiny_wan.build("t2v") for _ in range(2))
    ours.transformer.load_state_dict(theirs.transformer.state_dict())
    files = [weights(theirs, 4, 1), weights(theirs, 2, 2), weights(theirs, 4, 3)]
    inputs = {
        "prompt_embeds": torch.randn(1, 12, 32),
        "negative_prompt_embeds": torch.randn(1, 12, 32),
        **tiny_wan.arguments("t2v", prompt=None, output_type="latent", num_inference_steps=1),
    }
    install(ours, TPUConfig(mesh=mesh))
    ours.to("cuda")
    runner = ours.transformer._tpu_runner

    def error() -> float:
        with torch.no_grad():
            ourses, oracle = (pipe(**inputs, **tiny_wan.fresh()).frames for pipe in (ours, theirs))
        return relative(np.asarray(ourses), np.asarray(oracle))

    assert error() < 1e-4
    last = None
    for name, (step, executables) in SCRIPT.items():
        before = runner.compilations
        for pipe in (ours, theirs):
            step(pipe, files)
        found = error()
        assert found < 1e-4, (name, found)
        assert runner.compilations - before <= executables, name
        last = name
    assert last == "unload" and not runner.eager
