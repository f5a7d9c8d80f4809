"""Submodules of what cannot be compiled whole. Oracle: small modules of known lines, in torch on the host."""

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from conftest import programs_of, relative
from diffusers import tpu
from diffusers.tpu.compile import explain
from test_ladder import WIDTH, Scanned, first, rungs


pytestmark = pytest.mark.usefixtures("without_gradients")


class Routed(torch.nn.Module):
    """By what weights have made."""

    def __init__(self):
        super().__init__()
        self.gate, self.bias = torch.nn.Linear(WIDTH, 2), torch.nn.Parameter(torch.randn(WIDTH))
        self.ways = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return self.ways[self.gate(x).sum() > 0](x) + self.bias * self.count


class Lacking(torch.nn.Sequential):
    def forward(self, x):
        return self[0](torch.special.airy_ai(x))


class Failing(torch.nn.Module):
    """A view in another dtype, at which torchax ends with a TypeError."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x.view(torch.int32).view(torch.float32)) * self.calls


MIDDLES = {
    "routed": (Routed, {"middle": "parts", "middle.gate": "compiled"}, "it decides by a value (test_parts.py, line"),
    "lacking": (
        lambda: Lacking(torch.nn.Linear(WIDTH, WIDTH)),
        {"middle": "parts", "middle.0": "compiled"},
        "torchax lacks aten.special_airy_ai.default (test_",
    ),
    "failing": (Failing, {"middle": "host"}, "TypeError (test_parts.py, line"),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_a_submodule_that_cannot_be_compiled_runs_while_the_rest_is(chips, name):
    build, expected, reason = MIDDLES[name]
    theirs = Scanned(build())
    ours = tpu.install(copy.deepcopy(theirs), tpu.TPUConfig(mesh=(2, 2, 2)))
    runner, mask = ours._tpu_runner, first(3, 5)

    def differ() -> float:
        x = torch.randn(2, 4, WIDTH)
        return relative(ours(x, mask), theirs(x, mask))

    assert max(differ() for _ in range(40)) < 1e-6  # both ways of each branch, whatever is drawn
    found = rungs(runner)
    assert {module: found[module] for module in expected} == expected
    assert found | {"": "parts", "first": "compiled"} == found
    assert [found[f"blocks.{n}"] for n in range(3)] == ["decided"] * 3
    compiled = programs_of(runner)
    assert differ() < 1e-6 and programs_of(runner) == compiled
    for line in ("Scanned.blocks.*: decided (3 alike)", reason, f"Scanned.middle: {expected['middle']}"):
        assert line in tpu.explain(ours)
    assert any(one["module"] == "blocks.2" for one in tpu.report(ours)["programs"])
    blocks = [next(iter(runner.split.runners[f"blocks.{n}"].programs.values())).compiled for n in range(3)]
    assert blocks[0] is blocks[1] is blocks[2]
    for m in (ours, theirs):
        m.middle = torch.nn.Identity()
    assert differ() < 1e-6 and rungs(runner) == {"": "decided"} and runner._placed.arrays
    theirs.middle = build()
    ours.middle = copy.deepcopy(theirs.middle)  # one like the first, which the first one's runner does not run
    assert differ() < 1e-6 and rungs(runner)["middle"] == expected["middle"]
    copied = copy.deepcopy(ours)
    x = torch.randn(2, 4, WIDTH)
    assert relative(copied(x, mask), copy.deepcopy(theirs)(x, mask)) < 1e-6
    assert "forward" not in vars(ours.first) and not any("_tpu" in key for m in ours.children() for key in vars(m))


class Store:
    def __init__(self):
        self.kept = []


class Shares(torch.nn.Module):
    """What a part does to what it was given, its caller sees."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, how):
        if isinstance(how, Store):
            how.kept.append(self.linear(x))
            return how.kept[0]
        if how == "writes":
            x += self.linear(x)
        return x if how != "view" else x[1:]


class Caller(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shares = Shares()

    def forward(self, x, how):
        x = x * 2
        if x.mean().item() > 1e9:
            return x
        store = Store()
        y = self.shares(x, store if how == "store" else how)
        y += 1
        return x + y[:1] * 3 + sum(store.kept)


@pytest.mark.parametrize("how", ["writes", "same", "view", "store"])
def test_a_part_shares_its_callers_memory(attach, how):
    theirs = Caller()
    runner = attach(ours := copy.deepcopy(theirs), 1, 1, 1)
    for _ in range(2):
        x = torch.randn(3, WIDTH)
        assert relative(ours(x, how), theirs(x, how)) < 1e-6
    assert rungs(runner)["shares"] == "parts"


def looped(model, words) -> list:
    """What a script's own loop finds, which hands on the cache that it is given."""
    found, cache = [], None
    for _ in range(4):
        output = model(words, past_key_values=cache)
        words, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        found += words.flatten().tolist()
    return found


def test_a_language_model_goes_on_from_its_keys_and_values(attach):
    """On the host, as no length comes twice; the encoder that it is for pipelines is a program, before and after."""
    config = Qwen3Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        vocab_size=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    theirs = Qwen3ForCausalLM(config).eval()
    runner = attach(ours := copy.deepcopy(theirs), 1, 2, 1)
    words = torch.randint(1, 64, (1, 5))
    answers = [model.generate(words, max_new_tokens=4, do_sample=False).tolist() for model in (ours, theirs)]
    assert answers[0] == answers[1]
    for _ in range(2):
        assert relative(*(model(words, use_cache=False).logits for model in (ours, theirs))) < 1e-6
    assert [one["rung"] for one in explain.rungs(runner)] == ["compiled", "host"] and programs_of(runner) == 1
    assert looped(attach(copy.deepcopy(theirs), 1, 2, 1).module, words) == looped(theirs, words)
