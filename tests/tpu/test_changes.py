"""Oracle: the same module in torch, changed the same way. What a user changes after a first call is what the next call computes.

Each case is a change that upstream sees. A change of a number that is an argument compiles nothing.
"""

import contextlib
import copy
import functools

import numpy as np
import peft
import pytest
import torch

import tiny_images
from conftest import relative
from diffusers.hooks import apply_layerwise_casting
from diffusers.tpu import bridge
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.config import TPUConfig
from diffusers.tpu.pipelines.plans import module_plan


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


@pytest.fixture
def both(make_mesh):
    """A model on the chips, the same one in torch, and a function that calls both on fresh inputs: their difference."""
    theirs = Model().eval()
    ours = copy.deepcopy(theirs)
    runner = CompiledModule(ours, ModelPlan(), make_mesh(2, 2, 2), TPUConfig())
    runner.attach()

    def differ() -> float:
        x, c = torch.randn(2, 3, WIDTH), torch.randn(WIDTH)
        with torch.no_grad():
            return relative(ours(x, c), theirs(x, c))

    assert differ() < 1e-6
    return ours, theirs, runner, differ


def replaced_processor(model):
    model.blocks[1].attn.processor = Processor()
    model.blocks[1].attn.processor.strength = 3.0


def own_forward(model):
    block = model.blocks[2]
    block.forward = lambda x, c: x - c


def hooked(model, path="blocks.1.attn.norm"):
    return model.get_submodule(path).register_forward_hook(lambda module, args, output: output * 2)


def another_hook(model, path="blocks.1.attn.norm"):
    module = model.get_submodule(path)
    module._forward_hooks.clear()
    module.register_forward_hook(lambda module, args, output: output * 3)


def doubled_data(model):
    for p in model.parameters():
        p.data.mul_(2)


CHANGES = {
    "attribute of a submodule": lambda m: setattr(m.blocks[2].attn.norm, "eps", 0.5),
    "a number of each block's own": lambda m: [setattr(b, "layer_idx", n) for n, b in enumerate(m.blocks)],
    "attribute of every block": lambda m: [setattr(b.attn.norm, "eps", 0.5) for b in m.blocks],
    "a number in a dict": lambda m: m.blocks[1].gates.update({"in": 2.0}),
    "a number in a list in a dict": lambda m: m.blocks[3].gates["out"].__setitem__(0, 7.0),
    "a processor's setting": lambda m: setattr(m.blocks[0].attn.processor, "strength", 4.0),
    "another processor": replaced_processor,
    "a forward of one instance": own_forward,
    "a hook inside of one block": hooked,
    "another hook in its place": another_hook,
    "a hook on one block": lambda m: hooked(m, "blocks.2"),
    "an activation of one block": lambda m: setattr(m.blocks[1], "act", torch.nn.GELU()),
    "a submodule of another kind": lambda m: setattr(m.blocks[1].attn, "norm", torch.nn.Identity()),
    "a block less": lambda m: m.blocks.pop(1),
    "a module replaced by its like": lambda m: setattr(m.blocks[1].attn.to_q, "weight", m.blocks[0].attn.to_q.weight),
    "a plain attribute of the class": lambda m: setattr(m, "gain", 2.0),
    "written through .data": doubled_data,
    "another tensor as .data": lambda m: setattr(m.blocks[0].attn.to_q.weight, "data", torch.ones(WIDTH, WIDTH)),
}


@pytest.mark.idiom("processors", "attributes", "data-writes")
def test_every_change_after_a_first_call_is_seen(both):
    """One after the other, on the same model."""
    ours, theirs, runner, differ = both
    for name, change in CHANGES.items():
        change(ours)
        change(theirs)
        assert differ() < 1e-6 and differ() < 1e-6, name
    assert not runner.eager


@pytest.mark.idiom("hooks")
def test_what_comes_back_is_not_compiled_again(both):
    ours, theirs, runner, differ = both
    hooks = [hooked(m) for m in (ours, theirs)]
    for m in (ours, theirs):
        m.blocks[2].attn.processor.strength = 4.0
    assert differ() < 1e-6 and runner.compilations == 2
    for m, hook in zip((ours, theirs), hooks):
        hook.remove()
        m.blocks[2].attn.processor.strength = 1.0
    assert differ() < 1e-6 and runner.compilations == 2


@pytest.mark.idiom("layerwise-casting")
@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_weights_that_hooks_cast_for_each_call(both, storage):
    ours, theirs, runner, differ = both
    for model in (ours, theirs):
        apply_layerwise_casting(model, storage, torch.float32)
    assert max(differ() for _ in range(3)) < 1e-6
    assert {one.dtype for name, one in ours.named_parameters() if "to_q" in name} == {storage}
    assert not runner.eager


@pytest.mark.idiom("own-forward")
def test_a_method_replaced_on_the_class_is_seen(both, monkeypatch):
    ours, theirs, runner, differ = both
    block_forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, c: x * c)
    assert differ() < 1e-6
    monkeypatch.setattr(Block, "forward", block_forward)
    monkeypatch.setattr(torch.nn.SiLU, "forward", torch.nn.Tanh.forward)
    assert differ() < 1e-6
    monkeypatch.setattr(Model, "forward", lambda self, hidden_states, context: hidden_states + context)
    assert differ() < 1e-6


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
    ours, theirs, runner, differ = both
    stores = [Keeping(), Keeping()]
    for m, store in zip((ours, theirs), stores):
        m.blocks[1].attn.processor = store
    compiled = runner.compilations
    for _ in range(3):
        assert differ() < 1e-6
    assert [store.calls for store in stores] == [3, 3] and runner.compilations == compiled
    for kept, oracle in zip(*(store.kept for store in stores)):
        assert relative(bridge.from_numpy(kept.jax()) if bridge.on_device(kept) else kept, oracle) < 1e-6
    for m in (ours, theirs):
        m.blocks[1].attn.processor = Processor()
    assert differ() < 1e-6 and runner.compilations == compiled  # as before: the first program again


def test_hooks_that_keep_outputs_in_names_of_the_script(both):
    ours, theirs, runner, differ = both
    kept = {}
    for name, m in (("ours", ours), ("theirs", theirs)):
        m.blocks[2].register_forward_hook(
            lambda module, args, output, name=name: kept.setdefault(name, []).append(output)
        )
    for _ in range(2):
        assert differ() < 1e-6
    for one, oracle in zip(kept["ours"], kept["theirs"], strict=True):
        assert relative(bridge.from_numpy(one.jax()), oracle) < 1e-6


class Deciding:
    """By what weights have made."""

    def __call__(self, x):
        return x if x.mean() > 0 else x * 2


@pytest.mark.idiom("decisions", "random-inside")
def test_a_decision_by_a_value_and_random_numbers_run_eagerly(both):
    ours, theirs, runner, differ = both
    for m in (ours, theirs):
        m.blocks[0].attn.processor = Deciding()
    for _ in range(4):
        assert differ() < 1e-6
    assert "decides by a value (test_changes.py, line" in runner.eager[0]
    for m in (ours, theirs):
        m.blocks[0].forward = lambda x, c: x + torch.randn(x.shape, device=x.device)
    for _ in range(2):
        x, c = torch.randn(2, 3, WIDTH), torch.randn(WIDTH)
        results = []
        for m in (ours, theirs):
            torch.manual_seed(5)
            with torch.no_grad():
                results.append(m(x, c))
        assert relative(*results) < 1e-6


# LoRA, through peft


def adapted(model, name: str, targets: list[str], seed: int):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model, name)


def set_scales(model, **scales: float):
    for layer in (m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)):
        layer.set_adapter([*scales])
        for name, scale in scales.items():
            layer.set_scale(name, scale)


def layers(model):
    return [m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]


@pytest.mark.idiom("lora-layers")
def test_lora(both):
    ours, theirs, runner, differ = both
    for m in (ours, theirs):
        adapted(m, "a", ["to_q"], 1)
        adapted(m, "b", ["blocks.1.attn.to_q"], 2)
        set_scales(m, a=1.0)
        m.eval()
    assert differ() < 1e-6
    compiled = runner.compilations
    for scale in (0.25, 0.0, -2.0, 1.5):
        for m in (ours, theirs):
            set_scales(m, a=scale)
        assert differ() < 1e-6 and runner.compilations == compiled, scale
    for m in (ours, theirs):  # of one block
        layers(m)[2].set_scale("a", 3.0)
    assert differ() < 1e-6 and runner.compilations == compiled
    for m in (ours, theirs):  # hot-swap: other weights of the same shape
        for layer in layers(m):
            layer.lora_B["a"].weight.data.copy_(layer.lora_B["a"].weight.flip(0))
    assert differ() < 1e-6 and runner.compilations == compiled
    for change in (
        lambda layer: layer.enable_adapters(False),
        lambda layer: layer.enable_adapters(True),
        lambda layer: layer.merge(),
        lambda layer: layer.unmerge(),
        lambda layer: layer.set_adapter(["a", "b"]) if "b" in layer.lora_A else None,
        lambda layer: layer.delete_adapter("b"),
        lambda layer: layer.scale_layer(0.5),
    ):
        for m in (ours, theirs):
            for layer in layers(m):
                change(layer)
        assert differ() < 1e-6


def test_a_number_that_decides_is_a_constant(both):
    ours, theirs, runner, differ = both

    def forward(self, x):
        scale = self.scaling["a"]
        return self.base_layer(x) * (scale if scale > 0.5 else 2.0)

    for m in (ours, theirs):
        adapted(m, "a", ["to_q"], 1)
        for layer in layers(m):
            layer.forward = functools.partial(forward, layer)
        m.eval()
    for scale in (0.1, 0.7, 0.1):
        for m in (ours, theirs):
            set_scales(m, a=scale)
        assert differ() < 1e-6


# Values that wait


@contextlib.contextmanager
def resident(runner):
    env = bridge.environment()
    with env.override_property(mesh=runner.mesh), env, torch.no_grad():
        yield env


def guided(module, guide, x, c):
    """A denoiser called once per branch, as guiders do, which change the module in between."""
    results = []
    for branch in range(3):
        with guide(module, branch):
            results.append(module(x, c + branch))
    return results[0] + 3.0 * (results[0] - results[1]) - 0.5 * results[2]


@contextlib.contextmanager
def skipping(module, branch):
    """Layer skip in the third branch alone: gone when its value is needed."""
    block = module.blocks[1]
    if branch == 2:
        block.forward = lambda x, c: x
    try:
        yield
    finally:
        vars(block).pop("forward", None)


@contextlib.contextmanager
def nothing(module, branch):
    yield


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("guide", [nothing, skipping])
def test_three_branches(make_mesh, dp, guide):
    theirs = Model().eval()
    ours = copy.deepcopy(theirs)
    runner = CompiledModule(ours, ModelPlan(batched=("hidden_states", "context")), make_mesh(dp, 1, 1), TPUConfig())
    runner.attach()
    for _ in range(2):
        x, c = torch.randn(1, 3, WIDTH), torch.randn(1, 1, WIDTH)
        with torch.no_grad():
            oracle = guided(theirs, guide, x, c)
        with resident(runner) as env:
            result = bridge.from_numpy(guided(ours, guide, env.moved(x), env.moved(c)).jax())
        assert relative(result, oracle) < 1e-6
    assert runner.compilations == (1 if guide is nothing else 2)


def test_writes_in_place_while_a_call_waits(make_mesh):
    theirs = Model().eval()
    ours = copy.deepcopy(theirs)
    runner = CompiledModule(ours, ModelPlan(batched=("hidden_states",)), make_mesh(2, 1, 1), TPUConfig())
    runner.attach()
    x, c = torch.randn(1, 3, WIDTH), torch.randn(WIDTH)

    def twice(module, x, c):
        a = module(x, c)
        x.mul_(2)
        c.add_(1)  # shared: the second call is another one
        return a, module(x, c)

    with torch.no_grad():
        oracles = twice(theirs, x.clone(), c.clone())
    with resident(runner) as env:
        for made in (lambda t: env.moved(t.clone()), torch.clone):  # on the chips, and on the host
            for result, oracle in zip(twice(ours, made(x), made(c)), oracles):
                assert relative(bridge.from_numpy(result.jax()), oracle) < 1e-6


class Between(torch.nn.Module):
    """Does things to what its blocks share, or gives them one value twice."""

    _repeated_blocks = ["Block"]

    def __init__(self, loop):
        super().__init__()
        self.blocks, self.loop = torch.nn.ModuleList(Block() for _ in range(BLOCKS)), loop

    def forward(self, x, c):
        return self.loop(self.blocks, x, c.clone())


def writes_between(blocks, x, c):
    for block in blocks:
        x = block(x, c)
        c.mul_(0.5)
    return x


def writes_a_part_between(blocks, x, c):
    for block in blocks:
        x = block(x, c)
        c[0] = 3.0
    return x


def one_value_twice(blocks, x, c):
    x = blocks[0](x, c)
    for block in blocks[1:]:
        x = block(x, x)
    return x


@pytest.mark.parametrize("loop", [writes_between, writes_a_part_between, one_value_twice])
def test_blocks_see_the_values_of_their_call(make_mesh, loop):
    model = Between(loop).eval()
    x, c = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    with torch.no_grad():
        theirs = model(x, c)
        CompiledModule(model, ModelPlan(), make_mesh(1, 1, 1), TPUConfig()).attach()
        assert relative(model(x, c), theirs) < 1e-6


# What a trace leaves behind, and what it reads beside the module


class Tables(torch.nn.Module):
    """As Qwen-Image's positions: computed on the device once per length, and kept on the class."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    @functools.lru_cache(maxsize=None)
    def table(self, length, device):
        return torch.arange(length, device=device)[:, None] * torch.ones(WIDTH, device=device)

    def forward(self, x):
        return self.linear(x) + self.table(4, x.device)[:1] + self.table(x.shape[1], x.device)


def test_a_cache_on_the_class_keeps_nothing_of_a_trace(make_mesh):
    module = Tables().eval()
    runner = CompiledModule(module, ModelPlan(), make_mesh(1, 1, 1), TPUConfig())
    runner.attach()
    for length in (3, 5, 3):
        x = torch.randn(2, length, WIDTH)
        with torch.no_grad():
            assert relative(module(x), Tables.forward(module, x)) < 1e-6
    assert not runner.eager


class Lazily:
    """No module: fills a table when it is first asked, as Z-Image's rope embedder does."""

    table = None

    def __call__(self, x):
        if self.table is None:
            self.table = [torch.ones(WIDTH, device=x.device) * 3]
        return x * self.table[0]


def test_what_the_first_call_makes_once_and_keeps_is_a_constant(both):
    ours, theirs, runner, differ = both
    for m in (ours, theirs):
        m.blocks[1].attn.processor = Lazily()
    assert differ() < 1e-6
    compiled = runner.compilations
    assert differ() < 1e-6 and differ() < 1e-6
    assert runner.compilations == compiled + 1 and not runner.eager


# What a forward leaves in its own module, on its class or in names of the script


def made(forward, blocks: int = 0, **attributes):
    """A model with this forward, or of blocks with it; the class is its own."""
    cls = type("Leaving", (torch.nn.Module,), {"forward": forward, "kept": []})
    parts = [cls() for _ in range(blocks or 1)]
    for part in parts:
        part.linear = torch.nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            (part.register_buffer if name == "buffer" else part.__setattr__)(name, copy.deepcopy(value))
    return (Row(parts) if blocks else parts[0]).eval()


class Row(torch.nn.Module):
    _repeated_blocks = ["Leaving"]

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def of_before(self, x):
    before, self.before = self.before, x
    return self.linear(x) + (0 if before is None else before)


def of_its_list(self, x):
    self.list.append(x)
    return self.linear(x) - self.list[0]


def of_a_length(self, x):
    self.list.append(None)
    return self.linear(x) * len(self.list)


def of_the_class(self, x):
    self.kept.append(x)
    return self.linear(x) - self.kept[0]


def of_the_script(self, x):
    before, MEMORY.before = MEMORY.before, x
    return self.linear(x) + before


def of_a_name(self, x):
    global remembered
    before, remembered = remembered, x
    return self.linear(x) + before


def of_the_first(self, x):
    if not hasattr(self, "first"):
        self.first = x
    return self.linear(x) - self.first


def of_a_new_number(self, x):
    self.count = getattr(self, "count", 0) + 1
    return self.linear(x) * self.count


def of_a_count(self, x):
    self.count = self.count + torch.ones((), device=x.device)
    return self.linear(x) * self.count


def of_a_buffer(self, x):
    before, self.buffer = self.buffer, x
    return self.linear(x) - before


def of_a_buffer_in_place(self, x):
    self.buffer.add_(x)
    return self.linear(x) - self.buffer


def of_a_sum(self, x):
    self.before.add_(x)
    return self.linear(x) - self.before


class Memory:
    before = 0


MEMORY, remembered = Memory(), 0
ROWS = torch.zeros(3, WIDTH)
KEPT = {
    of_before: ({"before": ROWS}, "left in before"),
    of_its_list: ({"list": []}, "left in list"),
    of_a_length: ({"list": []}, "left in list"),
    of_the_class: ({}, "from call to call"),
    of_the_script: ({}, "from call to call"),
    of_a_name: ({}, "from call to call"),
    of_the_first: ({}, "left in first"),
    of_a_new_number: ({}, "left in count"),
    of_a_count: ({"count": torch.ones(())}, "left in count"),
    of_a_buffer: ({"buffer": ROWS}, "writes into buffer"),
    of_a_buffer_in_place: ({"buffer": ROWS}, "writes into buffer"),
    of_a_sum: ({"before": ROWS}, "decides by a value (test_changes.py, line"),
}


def called(model, inputs) -> list[torch.Tensor]:
    global remembered
    MEMORY.before = remembered = 0
    with torch.no_grad():
        return [model(x).clone() for x in inputs]


def as_upstream(mesh, build) -> CompiledModule:
    """The runner of a model that was called some times, each time with upstream's answer."""
    inputs, theirs = torch.randn(4, 3, WIDTH), build()
    weights = copy.deepcopy(theirs.state_dict())
    oracles, ours = called(theirs, inputs), build()
    ours.load_state_dict(weights)
    runner = CompiledModule(ours, ModelPlan(), mesh, TPUConfig())
    runner.attach()
    for answer, oracle in zip(called(ours, inputs), oracles, strict=True):
        assert relative(answer, oracle) < 1e-6
    return runner


@pytest.mark.idiom("stores")
@pytest.mark.parametrize("forward", KEPT, ids=lambda forward: forward.__name__)
def test_what_a_forward_leaves_and_reads_is_upstreams(make_mesh, forward):
    attributes, reason = KEPT[forward]
    runner = as_upstream(make_mesh(1, 1, 1), functools.partial(made, forward, **attributes))
    assert not runner.programs and len(runner.eager) == 1 and reason in runner.eager[0]


def test_what_blocks_leave_and_read_is_upstreams(make_mesh):
    runner = as_upstream(make_mesh(2, 2, 2), lambda: made(of_before, blocks=BLOCKS, before=None))
    assert not runner.compilations and "left in blocks.0.before" in runner.eager[0]


def only_written(self, x):
    self.before, self.shape = self.linear(x), x.shape
    return self.before * 2


def emptied_first(self, x):
    self.list = [None] * 2
    for _ in range(2):
        self.list[0] = self.linear(x) + (0 if self.list[0] is None else self.list[0])
    return self.list[0]


def emptied_last(self, x):
    for _ in range(2):
        self.list.append(self.linear(x) + sum(self.list))
    x = self.list[1]
    self.list.clear()
    return x


def of_a_table(self, x):
    if self.before is None:
        self.before = torch.arange(WIDTH, device=x.device) * 0.5
    return self.linear(x) * self.before


def of_a_flag(self, x):
    if hasattr(self, "called"):
        return self.linear(x)
    self.called = True
    return x


@pytest.mark.parametrize("blocks", [0, BLOCKS])
@pytest.mark.parametrize(
    "forward", [only_written, emptied_first, emptied_last, of_a_table, of_a_flag], ids=lambda forward: forward.__name__
)
def test_scratch_tables_and_what_the_first_call_does_stay_compiled(make_mesh, forward, blocks):
    runner = as_upstream(make_mesh(1, 1, 1), lambda: made(forward, blocks, list=[], before=None))
    assert not runner.eager and runner.compilations == 1


def printed(self, x):
    print(x)
    return self.linear(x)


def checked(self, x):
    if x.shape[0] != 2:
        raise ValueError(f"expected two rows, got {x}")
    return self.linear(x)


READS = {
    "formatted": lambda self, x: self.linear(x) * float(f"{x.max():.2f}"),
    "text": lambda self, x: self.linear(x) * str(x).count("-"),
    "numpy": lambda self, x: self.linear(x) + torch.from_numpy(x.numpy() * 2),
    "array": lambda self, x: self.linear(x) + float(np.asarray(x, dtype=np.float64).sum()),
    "array of a view": lambda self, x: self.linear(x) + torch.as_tensor(np.asarray(x[1:2]) * 2),
    "printed": printed,
}


@pytest.mark.idiom("decisions")
@pytest.mark.parametrize("name", READS)
def test_texts_and_arrays_of_values_are_values(make_mesh, name, capsys):
    runner = as_upstream(make_mesh(1, 1, 1), lambda: made(READS[name]))
    why = "it calls print" if name == "printed" else "decides by a value (test_changes.py, line"
    assert not runner.programs and why in runner.eager[0]
    shown = capsys.readouterr().out.replace(", device='jax:0'", "")
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]


def test_a_check_says_upstreams_values(make_mesh):
    model, x = made(checked), torch.randn(3, WIDTH)
    CompiledModule(model, ModelPlan(), make_mesh(1, 1, 1), TPUConfig()).attach()
    with pytest.raises(ValueError) as error, torch.no_grad():
        model(x)
    assert str(error.value) == f"expected two rows, got {x}"


class Attending(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Denoising(Attending):
    def forward(self, x, timestep=None):
        return super().forward(x)


@pytest.mark.parametrize("cls, windowed", [(Attending, False), (Denoising, True)])
def test_a_window_of_attention_is_the_denoisers_alone(make_mesh, cls, windowed):
    module, x = cls(), torch.randn(1, 2, 9, WIDTH)
    CompiledModule(module, ModelPlan(), make_mesh(1, 1, 1), TPUConfig(attention_window=(1, 1))).attach()
    assert (relative(module(x), cls.forward(module, x)) > 1e-2) == windowed


def test_hidden_states_of_a_text_encoder_stay_right(make_mesh):
    """transformers installs hooks in the first forward that asks for them: a second trace would find them twice."""
    theirs = tiny_images.clip()
    ours = copy.deepcopy(theirs)
    runner = CompiledModule(ours, module_plan(ours), make_mesh(2, 2, 2), TPUConfig())
    runner.attach()
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        theirs.to(dtype)
        ours.to(dtype)
        for batch in (1, 2, 3, 1):
            ids = torch.randint(3, 60, (batch, 16))
            with torch.no_grad():
                states, oracle = (m(ids, output_hidden_states=True).hidden_states for m in (ours, theirs))
            assert len(states) == len(oracle)
            for one, other in zip(states, oracle):
                assert relative(one.float(), other.float()) < limit
    assert not runner.eager
