"""Oracle: the same module in torch, changed the same way. What a user changes after a first call is what the next call computes.

Each case is a change that upstream sees. A change of a number that is an argument compiles nothing.
"""

import contextlib
import copy
import functools

import peft
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import tiny
from conftest import relative, slow, table
from diffusers.hooks import apply_layerwise_casting
from diffusers.models.autoencoders import autoencoder_kl_wan
from diffusers.tpu import bridge
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile.state import read
from diffusers.tpu.compile.tracing.user_code import is_watched_inside, rewritten


WIDTH, BLOCKS = 8, 4


class Processor:
    def __init__(self):
        self.strength = 1.0

    def __call__(self, x):
        return x * self.strength


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.processor = Processor()

    def forward(self, x):
        return self.processor(self.to_q(self.norm(x)))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.gates, self.act = Attention(), {"in": 1.0, "out": [0.5]}, torch.nn.SiLU()
        self.layer_idx = 0

    def forward(self, x, c):
        gate = self.gates["in"] * self.gates["out"][0] * (1 + self.layer_idx)
        return x + self.act(self.attn(x) + c) * gate


FACTOR = 2.0


def scaled(self, x):
    return x * FACTOR


class Model(torch.nn.Module):
    """Equal blocks in a loop, as upstream's denoisers are."""

    _repeated_blocks = ["Block"]
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.dropped = torch.nn.Dropout(0.5)

    def forward(self, hidden_states, context):
        x = hidden_states
        for block in self.blocks:
            x = block(x, context)
        return self.dropped(x) * self.gain


class Both:
    """A model on the chips, and the same one in torch."""

    def __init__(self, attach, *degrees: int, plan: ModelPlan = ModelPlan()):
        self.theirs = Model().eval()
        self.ours = copy.deepcopy(self.theirs)
        self.runner = attach(self.ours, *degrees, plan=plan)

    def __iter__(self):
        return iter((self.ours, self.theirs))

    def change(self, change):
        for model in self:
            change(model)

    def error(self) -> float:
        """The difference on fresh inputs, from one seed."""
        x, c, state = torch.randn(2, 3, WIDTH), torch.randn(WIDTH), torch.get_rng_state()
        answers = []
        for model in self:
            torch.set_rng_state(state)
            with torch.no_grad():
                answers.append(model(x, c))
        return relative(*answers)


@pytest.fixture
def both(attach):
    both = Both(attach, 2, 2, 2)
    assert both.error() < 1e-6
    return both


# Lines that change a model `m`.
CHANGES = table("test_changes")


@pytest.mark.idiom("processors", "attributes", "data-writes", "hooks")
@pytest.mark.parametrize("calls", [0, slow(1), 2])
def test_every_change_is_seen(attach, calls):
    """One after the other, on the same model, which is called so often in between; 0: on a new one, once its weights are placed."""
    both = Both(attach, 2, 2, 2)
    assert calls == 0 or both.error() < 1e-6
    for name, lines in CHANGES.items():
        if calls == 0:
            both = Both(attach, 2, 2, 2)
            both.runner.place()
        both.change(lambda model: exec(lines, {**globals(), "m": model}))
        assert all(both.error() < 1e-6 for _ in range(calls or 1)), name
    assert not both.runner.eager


@pytest.mark.idiom("hooks")
def test_a_hook_of_all_modules_is_seen(both):
    for _ in range(2):
        with register_module_forward_hook(lambda m, args, out: out * 2 if type(m) is torch.nn.Linear else None):
            assert both.error() < 1e-6 and is_watched_inside(both.ours)
        assert both.error() < 1e-6 and not is_watched_inside(both.ours)
    assert both.runner.compilations == 2


@pytest.mark.idiom("layerwise-casting")
def test_weights_that_hooks_cast_for_each_call(both):
    both.change(lambda model: apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32))
    assert max(both.error() for _ in range(3)) < 1e-6
    assert {one.dtype for name, one in both.ours.named_parameters() if "to_q" in name} == {torch.float8_e4m3fn}
    assert not both.runner.eager


@pytest.mark.idiom("own-forward")
def test_a_method_replaced_on_the_class_is_seen(both, monkeypatch):
    before = Model.forward
    for cls, forward in (
        (Block, lambda self, x, c: x * c),
        (Block, Block.forward),
        (torch.nn.SiLU, torch.nn.Tanh.forward),
        (torch.nn.SiLU, torch.no_grad()(scaled)),
        (Model, lambda self, hidden_states, context: hidden_states + context),
    ):
        monkeypatch.setattr(cls, "forward", forward)
        assert both.error() < 1e-6
    assert rewritten(torch.nn.SiLU)  # a library's wrapper of the script's function is the script's
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    monkeypatch.setattr(Model, "forward", before)
    assert both.error() < 1e-6


def test_a_constant_of_upstreams_module_is_seen(monkeypatch):
    vae = tiny.wan_vae()
    before = read(vae)
    monkeypatch.setattr(autoencoder_kl_wan, "CACHE_T", 300)
    assert not before.same() and read(vae).key != before.key
    monkeypatch.undo()
    assert before.same() and read(vae).key == before.key


class Keeping:
    """As an attention store: keeps what passes, and counts."""

    def __init__(self):
        self.kept, self.calls = [], 0

    def __call__(self, x):
        self.kept.append(x)
        self.calls += 1
        return x * self.calls


@pytest.mark.idiom("stores")
def test_what_is_kept_from_call_to_call_is_the_values_and_each_call_sees_the_last(both):
    both.change(lambda model: setattr(model.blocks[1].attn, "processor", Keeping()))
    stores, compiled = [model.blocks[1].attn.processor for model in both], both.runner.compilations
    assert max(both.error() for _ in range(3)) < 1e-6
    assert [store.calls for store in stores] == [3, 3] and both.runner.compilations == compiled
    for kept, oracle in zip(*(store.kept for store in stores)):
        assert relative(bridge.from_numpy(kept.jax()) if bridge.on_device(kept) else kept, oracle) < 1e-6
    both.change(lambda model: setattr(model.blocks[1].attn, "processor", Processor()))
    assert both.error() < 1e-6 and both.runner.compilations == compiled  # as before: the first program again


class Deciding:
    """By what weights have made."""

    def __call__(self, x):
        return x if x.mean() > 0 else x * 2


@pytest.mark.idiom("decisions", "random-inside")
def test_a_decision_by_a_value_and_random_numbers_run_eagerly(both):
    both.change(lambda model: setattr(model.blocks[0].attn, "processor", Deciding()))
    assert max(both.error() for _ in range(4)) < 1e-6
    assert "decides by a value (test_changes.py, line" in both.runner.eager[0]
    drawing = lambda x, c: x + torch.randn(x.shape, device=x.device)  # noqa: E731
    both.change(lambda model: setattr(model.blocks[0], "forward", drawing))
    assert both.error() < 1e-6 and both.error() < 1e-6


# LoRA, through peft


def adapted(model, name: str, targets: list[str], seed: int):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model, name)


def layers(model):
    return [m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]


def set_scale(model, scale: float):
    for layer in layers(model):
        layer.set_adapter(["a"])
        layer.set_scale("a", scale)


@pytest.mark.idiom("lora-layers")
def test_lora(both):
    both.change(lambda model: adapted(model, "a", ["to_q"], 1))
    both.change(lambda model: adapted(model, "b", ["blocks.1.attn.to_q"], 2))
    both.change(lambda model: set_scale(model.eval(), 1.0))
    assert both.error() < 1e-6
    compiled = both.runner.compilations
    for change in (
        *(functools.partial(set_scale, scale=scale) for scale in (0.25, 0.0, -2.0, 1.5)),
        lambda model: layers(model)[2].set_scale("a", 3.0),  # of one block
        # Hot-swap: other weights of the same shape.
        lambda model: [one.lora_B["a"].weight.data.copy_(one.lora_B["a"].weight.flip(0)) for one in layers(model)],
    ):
        both.change(change)
        assert both.error() < 1e-6 and both.runner.compilations == compiled
    for change in (
        lambda layer: layer.enable_adapters(False),
        lambda layer: layer.enable_adapters(True),
        lambda layer: layer.merge(),
        lambda layer: layer.unmerge(),
        lambda layer: layer.set_adapter(["a", "b"]) if "b" in layer.lora_A else None,
        lambda layer: layer.delete_adapter("b"),
        lambda layer: layer.scale_layer(0.5),
    ):
        both.change(lambda model: [change(layer) for layer in layers(model)])
        assert both.error() < 1e-6


def test_a_number_that_decides_is_a_constant(both):
    def forward(self, x):
        scale = self.scaling["a"]
        return self.base_layer(x) * (scale if scale > 0.5 else 2.0)

    both.change(lambda model: adapted(model, "a", ["to_q"], 1))
    for layer in (layer for model in both for layer in layers(model.eval())):
        layer.forward = functools.partial(forward, layer)
    for scale in (0.1, 0.7, 0.1):
        both.change(functools.partial(set_scale, scale=scale))
        assert both.error() < 1e-6


# Values that wait


def guided(module, skips: bool, x, c):
    """A denoiser called once per branch; a guider changes the module for the third, and back before its value is needed."""
    results, block = [], module.blocks[1]
    for branch in range(3):
        if skips and branch == 2:
            block.forward = lambda x, c: x
        results.append(module(x, c + branch))
        vars(block).pop("forward", None)
    return results[0] + 3.0 * (results[0] - results[1]) - 0.5 * results[2]


@contextlib.contextmanager
def resident(runner):
    env = bridge.environment()
    with env.override_property(mesh=runner.mesh), env, torch.no_grad():
        yield env


@pytest.mark.idiom("guidance")
@pytest.mark.parametrize("dp, skips, programs", [(2, True, 3), (3, False, 1), (3, True, 4)])
def test_three_branches(attach, dp, skips, programs):
    """Those that nothing came beside run alone the next time."""
    both = Both(attach, dp, 1, 1, plan=ModelPlan(batched=("hidden_states", "context")))
    for _ in range(2):
        x, c = torch.randn(1, 3, WIDTH), torch.randn(1, 1, WIDTH)
        with torch.no_grad():
            oracle = guided(both.theirs, skips, x, c)
        with resident(both.runner) as env:
            result = bridge.from_numpy(guided(both.ours, skips, env.moved(x), env.moved(c)).jax())
        assert relative(result, oracle) < 1e-6
    assert both.runner.compilations == programs


def test_writes_in_place_while_a_call_waits(attach):
    both = Both(attach, 2, 1, 1, plan=ModelPlan(batched=("hidden_states",)))
    x, c = torch.randn(1, 3, WIDTH), torch.randn(WIDTH)

    def twice(module, x, c):
        a = module(x, c)
        x.mul_(2)
        c.add_(1)  # shared: the second call is another one
        return a, module(x, c)

    with torch.no_grad():
        oracles = twice(both.theirs, x.clone(), c.clone())
    with resident(both.runner) as env:
        for made in (lambda t: env.moved(t.clone()), torch.clone):  # on the chips, and on the host
            for result, oracle in zip(twice(both.ours, made(x), made(c)), oracles):
                assert relative(bridge.from_numpy(result.jax()), oracle) < 1e-6
