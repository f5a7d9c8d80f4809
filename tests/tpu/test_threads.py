"""Oracle: upstream's pipelines with the same weights, called one after the other before they are installed."""

import copy
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel, modeling_utils

import diffusers.models.attention_dispatch_flax  # noqa: F401  # which a trace imports
import tiny
from conftest import relative, slow
from diffusers import WanPipeline, tpu
from diffusers.models.transformers import transformer_wan_flax
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from diffusers.tpu import bridge
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile import programs
from diffusers.tpu.compile.state import state as tracing
from diffusers.tpu.compile.tracing import blocks
from diffusers.tpu.weights import checkpoint


PROMPTS = ("a red circle", "moving left", "a circle moving", "red")


def pipelines(threads: int) -> list[WanPipeline]:
    """Upstream's advice to servers: models are shared, each thread has a pipeline with a scheduler of its own."""
    base = tiny.wan(transformer={"num_layers": 2, "num_attention_heads": 2})
    return [WanPipeline(**base.components | {"scheduler": copy.deepcopy(base.scheduler)}) for _ in range(threads)]


def generate(pipe: WanPipeline, number: int, **others) -> np.ndarray:
    sizes = {"height": 16, "width": 16, "num_frames": 1, "num_inference_steps": 2, "guidance_scale": 5.0 + number}
    given = tiny.arguments("wan", prompt=PROMPTS[number], generator=tiny.fresh(number), **sizes)
    return pipe(**given, **others).frames


def together(calls: list) -> list:
    """What they return or raise, called from a thread each that all begin at once."""
    begin = threading.Barrier(len(calls))

    def run(call):
        begin.wait()
        try:
            return call()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(run, calls)]


MESHES = [(1, 1, 1), (1, 2, 1), (2, 1, 1)]


@pytest.mark.parametrize(
    "threads, meshes, rounds",
    [
        (4, MESHES[:1], 3),
        *(slow(threads, [mesh], 50) for threads in (2, 4) for mesh in MESHES),
        *(slow(threads, MESHES, 50) for threads in (2, 4)),
    ],
)
def test_threads_that_share_models(chips, threads, meshes, rounds):
    """On several meshes each round is on the next one, and compiles anew."""
    pipes = pipelines(min(threads, 3))
    pipes += pipes[: threads - len(pipes)]  # of four threads, two call one pipeline
    alone = [generate(pipe, number) for number, pipe in enumerate(pipes)]
    assert all(np.abs(one - other).max() > 1e-2 for one, other in itertools.combinations(alone, 2))
    for number in range(rounds):
        if number == 0 or len(meshes) > 1:
            config = tpu.TPUConfig(mesh=meshes[number % len(meshes)])
            for pipe in pipes:
                tpu.uninstall(pipe)
            together([lambda pipe=pipe: tpu.install(pipe, config) for pipe in pipes])
        answers = together([lambda n=n, pipe=pipe: generate(pipe, n) for n, pipe in enumerate(pipes)])
        for answer, theirs in zip(answers, alone):
            if isinstance(answer, BaseException):
                raise answer
            assert np.abs(answer - theirs).max() < 1e-4

    def other(pipe, step, timestep, given):
        """A callback of the user's may wait for a thread that calls another pipeline."""
        thread = threading.Thread(target=generate, args=(pipes[1], 1), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return given

    generate(pipes[0], 0, callback_on_step_end=other)


class Scaled(torch.nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x) * 2


@pytest.fixture
def compiling(monkeypatch):
    """(an event that is set when the next compilation begins, one that it waits for)."""
    began, go_on = threading.Event(), threading.Event()
    compile_now = programs.compile_lowered

    def compile_late(*args):
        began.set()
        assert go_on.wait(60)
        return compile_now(*args)

    monkeypatch.setattr(programs, "compile_lowered", compile_late)
    yield began, go_on
    go_on.set()


def test_while_a_program_is_compiled_others_run(attach, compiling):
    """Another model runs what it has, and is called for what it has not; a thread with the same call waits for the same program."""
    began, go_on = compiling
    slow, other = Scaled(), Scaled()
    runner, _ = (attach(module, 1, 2, 1) for module in (slow, other))
    x = torch.randn(3, 8)
    theirs = Scaled.forward(slow, x)
    go_on.set()
    there = other(x)
    began.clear(), go_on.clear()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(slow, x) for _ in range(2)]
        assert began.wait(60)
        assert torch.equal(pool.submit(other, x).result(60), there)
        go_on.set()
        assert all(relative(answer.result(60), theirs) < 1e-6 for answer in waiting)
    assert runner.compilations == 1


def test_a_model_that_changes_while_it_is_compiled_is_looked_at_again(attach, compiling):
    began, go_on = compiling
    slow = attach(Scaled(), 1, 1, 1).module
    x = torch.randn(3, 8)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(slow, x)
        assert began.wait(60)
        with torch.no_grad():
            slow.linear.weight.mul_(3)
        slow.linear.register_forward_hook(lambda module, args, output: output + 1)
        go_on.set()
        answer = answer.result(60)
    assert relative(answer, Scaled.forward(slow, x)) < 1e-6


def test_branches_of_two_threads_do_not_pair(attach):
    runner = attach(module := Scaled(), 2, 1, 1, plan=ModelPlan(batched=("x",)))
    given = [torch.randn(1, 8) for _ in range(3)]
    theirs = [Scaled.forward(module, x) for x in given]

    def first_branch(x):
        with bridge.environment(), bridge.decomposing():
            return module(x)

    with ThreadPoolExecutor(1) as pool, bridge.environment(), bridge.decomposing():
        mine = first_branch(given[0])
        others = pool.submit(first_branch, given[1]).result(60)
        assert mine.waits and others.waits and len(runner.branches.waiting) == 1
        runner.branches.forget()
        assert relative(bridge.from_numpy(others.jax()), theirs[1]) < 1e-6
        runner.branches.forget()
        second, third = module(given[0]), module(given[2])  # those of one thread do
        assert not second.waits
        for answer, number in ((second, 0), (third, 2)):
            assert relative(bridge.from_numpy(answer.jax()), theirs[number]) < 1e-6
        with pytest.raises(RuntimeError, match="expected a value of Scaled, got none"):
            mine.jax()


def test_loaders_of_transformers_put_back_what_they_replace(tmp_path, monkeypatch):
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    config = CLIPTextConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    CLIPTextModel(config).save_pretrained(tmp_path)
    load, before = checkpoint.checked(CLIPTextModel.from_pretrained), modeling_utils.safe_open
    open_file = checkpoint._File

    def slowly(*args, **kwargs):
        time.sleep(0.3)
        return open_file(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "_File", slowly)
    together([lambda: load(tmp_path), lambda: (time.sleep(0.15), load(tmp_path))])  # one begins within the other
    assert modeling_utils.safe_open is before


AFTER_ONE = 0  # a call that gave something


def held_by(model: torch.nn.Module) -> list:
    """All that a trace may replace of a model: attributes, weights, hooks, those of its classes, and process-wide hooks."""
    owners = {cls for m in model.modules() for cls in type(m).__mro__ if cls.__module__.startswith("diffusers.")}
    dicts = [d for m in model.modules() for d in (vars(m), m._parameters, m._buffers, m._modules, m._forward_hooks)]
    modules = [module for name, module in sys.modules.items() if name.startswith("diffusers.models.")]
    dicts += [vars(owner) for owner in (*sorted(owners, key=repr), *modules)]
    dicts += [torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks]
    return [(name, id(value)) for d in dicts for name, value in [*d.items()]]


FAULTS = {
    "while cached functions are replaced": (tracing, "_uncached", AFTER_ONE),
    "before a block's settings are known": (blocks, "signature", 2),
    "between two blocks' stand-ins": (blocks, "own_forward", 2),
    "while processors are replaced": (transformer_wan_flax.PLAN.processors, WanAttnProcessor, 2),
    "in the model, weights lent": (torch.nn.functional, "silu", 1),
    "in a block, its weights lent": (torch.nn.functional, "gelu", 1),
    "in the scan of blocks": (blocks.BlockRuns, "_scan", 1),
    "when the trace is over": (programs, "Program", 1),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_failed_trace_leaves_nothing(attach, monkeypatch, own_store, error):
    model = tiny.wan(transformer={"num_layers": 2, "num_attention_heads": 2}).transformer
    given = {
        "hidden_states": torch.randn(1, 16, 1, 4, 4), "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 5, 32), "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        theirs = model(**given)[0]
    attach(model, 1, 2, 1, plan=transformer_wan_flax.PLAN).place()
    before = held_by(model)
    for where, (owner, name, call) in FAULTS.items():
        calls, given_before = itertools.count(1), []
        original = owner[name] if isinstance(owner, dict) else getattr(owner, name)

        def fail(*args, **kwargs):
            if next(calls) == call or (call == AFTER_ONE and any(x is not None for x in given_before)):
                raise error(where)
            given_before.append(original(*args, **kwargs))
            return given_before[-1]

        with monkeypatch.context() as patched:
            (patched.setitem if isinstance(owner, dict) else patched.setattr)(owner, name, fail)
            with pytest.raises(error, match=where):
                model(**given)
        assert held_by(model) == before, where
    with torch.no_grad():
        assert relative(model(**given)[0], theirs) < 1e-5
