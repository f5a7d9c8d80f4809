"""Oracle: the same pipeline with the path off, the same LoRA calls in the same order. Every change is seen, and few compile."""

import copy
import gc

import jax
import numpy as np
import peft
import pytest
import torch

import tiny
from conftest import programs_of, relative
from diffusers.tpu import TPUConfig, install


LAYERS = ("attn1.to_q", "attn2.to_v", "ffn.net.2")


def weights(pipe, ranks: dict[int, int], seed: int, layers=LAYERS) -> dict[str, torch.Tensor]:
    """A LoRA file's tensors for the transformer, large enough to be seen. `ranks`: of blocks that have one."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for block, r in ranks.items():
        for layer in layers:
            out, inner = pipe.transformer.get_submodule(f"blocks.{block}.{layer}").weight.shape
            name = f"transformer.blocks.{block}.{layer}"
            found[f"{name}.lora_A.weight"] = torch.randn(r, inner, generator=generator) / inner**0.5
            found[f"{name}.lora_B.weight"] = torch.randn(out, r, generator=generator) * 0.5
    return found


def load(name: str, file: str, **options):
    return lambda pipe, files: pipe.load_lora_weights(copy.copy(files[file]), adapter_name=name, **options)


def adapters(names, scales=None):
    return lambda pipe, files: pipe.set_adapters(names, scales)


def unload_after_fusing(pipe, files):
    pipe.fuse_lora()
    pipe.unload_lora_weights()


def swapped(pipe, files):
    """Another file under another name, in the place of the one that there was."""
    pipe.load_lora_weights(copy.copy(files["3"]), adapter_name="c")
    pipe.delete_adapters(["a", "b"])
    pipe.set_adapters("c")


# (name, what a script does, how many executables of the transformer it may add, scale of the call after it)
SCRIPT = [
    ("load", load("a", "1"), 1, None),
    ("scale", adapters("a", 0.25), 0, None),
    ("scale of zero", adapters("a", 0.0), 0, None),
    ("scale below zero", adapters("a", -1.5), 0, None),
    ("scale of a call", adapters("a", 0.5), 0, 0.7),
    ("another", lambda p, f: None, 0, -0.3),
    ("zero, by which upstream forgets the other scale", lambda p, f: None, 1, 0.0),
    ("so that is one", lambda p, f: None, 0, None),
    ("disable", lambda p, f: p.disable_lora(), 0, None),
    ("enable", lambda p, f: p.enable_lora(), 0, None),
    ("another of another rank", load("b", "2"), 1, None),
    ("both", adapters(["a", "b"], [0.5, 2.0]), 1, None),
    ("other scales of both", adapters(["a", "b"], [0.7, -0.3]), 0, 0.5),
    ("scales by block", adapters("a", {"transformer": {"blocks.1": 0.1}}), 0, None),
    ("fuse", lambda p, f: p.fuse_lora(adapter_names=["a"], lora_scale=0.7), 0, 0.6),
    ("unfuse", lambda p, f: p.unfuse_lora(), 0, None),
    ("swap", swapped, 0, None),
    ("hot-swap", load("c", "1", hotswap=True), 0, None),
    ("hot-swap of a lower rank", load("c", "2", hotswap=True), 0, 0.5),
    ("fuse and unload", unload_after_fusing, 0, None),
    ("load again", load("a", "3"), 0, None),
    ("unload", lambda p, f: p.unload_lora_weights(), 0, None),
    ("prepared for hot-swaps", lambda p, f: p.enable_lora_hotswap(target_rank=6), 0, None),
    ("and loaded", load("a", "2"), 1, None),
    ("a higher rank", load("a", "1", hotswap=True), 0, None),
    ("unload all", lambda p, f: p.unload_lora_weights(), 0, None),
    ("ranks by block", load("r", "by block"), 1, -0.5),
]  # fmt: skip


@pytest.fixture
def pipes():
    return tiny.wan(), tiny.wan()


class Session:
    """Both pipelines: what is done to one is done to the other, and what they make of the same noise is compared."""

    def __init__(self, pipes, mesh, **changes):
        self.theirs, self.ours = pipes
        changes = {"generator": None, "prompt": None, "output_type": "latent", "num_inference_steps": 1, **changes}
        self.inputs = tiny.arguments("wan", **changes)
        self.inputs |= {"prompt_embeds": torch.randn(1, 12, 32), "negative_prompt_embeds": torch.randn(1, 12, 32)}
        install(self.ours, TPUConfig(mesh=mesh))
        self.ours.to("cuda")
        self.runner = self.ours.transformer._tpu_runner

    def does(self, step, files: dict, scale: float | None = None) -> float:
        """Relative error of the result after that step."""
        for pipe in (self.ours, self.theirs):
            step(pipe, files)
        return self.error(scale)

    def error(self, scale: float | None = None) -> float:
        given = {} if scale is None else {"attention_kwargs": {"scale": scale}}
        with torch.no_grad():
            ours, oracle = (p(**self.inputs, **given, generator=tiny.fresh()).frames for p in (self.ours, self.theirs))
        return relative(np.asarray(ours), np.asarray(oracle))


def all_of(rank: int) -> dict[int, int]:
    return dict.fromkeys(range(3), rank)


def files_of(pipe) -> dict[str, dict]:
    ranks = {"1": all_of(4), "2": all_of(2), "3": all_of(4), "by block": {0: 2, 1: 3, 2: 1}}
    return {name: weights(pipe, of_blocks, seed) for seed, (name, of_blocks) in enumerate(ranks.items(), 1)}


@pytest.mark.idiom("lora")
def test_a_session_with_loras(chips, pipes):
    session, files = Session(pipes, (2, 4, 1)), files_of(pipes[0])
    assert session.error() < 1e-4
    for name, step, executables, scale in SCRIPT:
        before = programs_of(session.runner)
        found = session.does(step, files, scale)
        assert found < 1e-4, (name, found)
        assert programs_of(session.runner) - before <= executables, name
    assert not session.runner.eager


def test_scales_and_swaps_trace_nothing_and_hold_nothing(chips, pipes, new_garbage):
    """Changes, twice: the second time arrays on the chips are as many, and as large, as after the first."""
    session, files = Session(pipes, (2, 4, 1)), files_of(pipes[0])
    session.does(load("a", "1"), files)
    known, held = {id(program) for program in session.runner.traced.values()}, []

    def alone(name, file):
        def step(pipe, files):
            pipe.delete_adapters(pipe.get_list_adapters().get("transformer", []))
            pipe.load_lora_weights(copy.copy(files[file]), adapter_name=name)

        return step

    for turn in range(2):
        for n in range(3):
            name = "ab"[n % 2]
            assert session.does(alone(name, str(1 + 2 * (n % 2))), files, 1.0 + n) < 1e-4
            assert session.does(adapters(name, 0.1 * n + turn), files, 0.3 + n) < 1e-4
        gc.collect()
        held.append((len(jax.live_arrays()), sum(array.nbytes for array in jax.live_arrays())))
    assert {id(program) for program in session.runner.traced.values()} == known and held[0] == held[1]


def test_blocks_with_and_without_an_adapter_are_one_scan(chips, pipes):
    """Two adapters, each in blocks of its own, of different rank; one block has both."""
    session = Session(pipes, (1, 2, 1))
    files = {"a": weights(pipes[0], {0: 2, 1: 4}, 1), "b": weights(pipes[0], {1: 3, 2: 3}, 2, LAYERS[:2])}
    for name in files:
        for pipe in pipes:
            load(name, name)(pipe, files)
    assert session.does(adapters([*files], [0.8, 0.8]), files, 0.5) < 1e-4
    assert [(g.start, g.stop) for g in session.runner.plan_weights().groups] == [(0, 3)]
    assert session.does(adapters([*files], [-0.4, -0.4]), files) < 1e-4
    assert programs_of(session.runner) == 1 and not session.runner.eager


def test_what_zeros_cannot_stand_for_is_scanned_apart(chips, pipes):
    """DoRA divides by norms of the sum; two adapters none of whose layers has both; a block whose adapters are disabled."""
    session = Session(pipes, (1, 2, 1))

    def add(name: str, *blocks: int, **settings):
        targets = [f"blocks.{block}.attn1.to_q" for block in blocks]
        for pipe in pipes:
            torch.manual_seed(len(name))
            config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **settings)
            pipe.transformer.add_adapter(config, name)

    add("dora", 0, 1, use_dora=True)
    assert session.error() < 1e-4
    assert [(g.start, g.stop) for g in session.runner.plan_weights().groups] == [(0, 2)]
    for pipe in pipes:
        pipe.transformer.delete_adapters("dora")
    add("x", 0)
    add("yy", 1)
    for pipe in pipes:
        pipe.transformer.set_adapters(["x", "yy"])
    assert session.error() < 1e-4 and not session.runner.eager


@pytest.mark.slow
def test_two_experts_and_a_guidance_of_one(chips):
    """Few-step adapters: of both experts, each its own file, without a second branch."""
    pipes = [tiny.wan_a14b() for _ in range(2)]
    session = Session(pipes, (1, 4, 1), guidance_scale=1.0)
    session.inputs |= {"num_inference_steps": 4, "guidance_scale_2": 1.0}
    files = {"high": weights(pipes[0], all_of(4), 1), "low": weights(pipes[0], all_of(4), 2)}
    for pipe in pipes:
        load("fast", "high")(pipe, files)
        load("fast", "low", load_into_transformer_2=True)(pipe, files)
    assert session.error() < 1e-4
    runners = (pipes[1].transformer._tpu_runner, pipes[1].transformer_2._tpu_runner)
    assert sum(program.calls for runner in runners for program in runner.programs.values()) == 4
