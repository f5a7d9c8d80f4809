"""What the key sees. Oracle: the same script without the path, its Python changed by the same lines.

A world is a script of its own: globals, classes, hooks, a model that reads some of it (`test_key.json`). It is made twice, once for torch and
once for the chips; both are changed by the same lines.
"""

import ast
import copy
import gc
import os
import random
import tempfile
import types
import weakref
from dataclasses import dataclass

import pytest
import torch

import diffusers.tpu
from conftest import ROOT, programs_of, relative, start_draws, table
from diffusers import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVCache,
    Flux2KVParallelSelfAttnProcessor,
)
from diffusers.tpu.compile.state import key


@dataclass(frozen=True)
class Feature:
    """Something that a user's code reads.

    Attributes:
        made: lines of the script that make it.
        read: an expression, in the place of a factor; `self` is the model, `ctx` an object that it is given.
        changes: lines that change it.
        steady: no call changes it: it need not run line by line.
    """

    made: str
    read: str
    changes: list[str]
    steady: bool = True


TABLE = table("test_key")
FEATURES = {name: Feature(*row) for name, row in TABLE["features"].items()}
PLACES = TABLE["places"]  # where a feature is read
NEEDS_MODEL = {"attribute tensor", "attribute flag"}
GIVEN = {name for name in FEATURES if name.startswith("given")}

SCRIPT = """
import argparse, array, collections, contextvars, dataclasses, enum, functools, itertools, math, os, pathlib, random, sys, types, weakref
import numpy as np, torch
setup = []
class Inner:
  def __init__(self): self.d = {{'s': 1.0}}
class Context:
  def __init__(self): self.s, self.t, self.inner, self.cache, self.seen = 1.0, torch.ones(8), Inner(), {{}}, []
  def cached(self, x):
    if 'k' not in self.cache: self.cache['k'] = x * 2
    return self.cache['k']
  def kept(self, x):
    self.seen = [*self.seen[-2:], x.abs().mean()]
    return sum(self.seen)
CONTEXT = Context()
part_reads = None
class Part(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.linear, self.processor, self.layer_idx = torch.nn.Linear(8, 8), None, 0
  def forward(self, x, ctx):
    y = self.linear(x) * (1 + 0.25 * self.layer_idx)
    if part_reads is not None: y = part_reads(self, y, ctx)
    return y if self.processor is None else self.processor(y, ctx)
{made}
class Model(torch.nn.Module):
  _repeated_blocks = ['Part']
  def __init__(self):
    super().__init__()
    self.linear, self.activation = torch.nn.Linear(8, 8), torch.nn.SiLU()
    self.parts = torch.nn.ModuleList(Part() for _ in range(3))
  def forward(self, x, ctx=None):
    x = self.linear(x){forward}
    for part in self.parts: x = part(x, ctx)
    return self.activation(x)
torch.manual_seed(0)
model = Model().eval()
for f in setup: f(model)
"""


def make_world(names: list[str], place: str, other: str) -> dict:
    """The script's namespace: all features are read in `place`, the first also in `other`."""
    read = " * ".join(f"({FEATURES[name].read})" for name in names)
    made = [FEATURES[name].made for name in names]
    for where, one in ((place, read), (other, FEATURES[names[0]].read)):
        made += [PLACES[where].format(read=one)] if PLACES[where] else []
    forward = f" * ({read})" if place == "forward" else ""
    module = types.ModuleType("world")
    exec(compile(SCRIPT.format(made="\n".join(made), forward=forward), "<world>", "exec"), vars(module))
    return vars(module)


def draw(rng: random.Random) -> tuple[list[str], str, str, list[str]]:
    """Of a random world: features, where they are read, where the first one also is, a line (or none) before each of the calls."""
    place = rng.choice([*PLACES])
    allowed = [name for name in FEATURES if place == "forward" or name not in NEEDS_MODEL]
    allowed = [name for name in allowed if name not in GIVEN or place in ("forward", "part", "processor")]
    names = rng.sample(allowed, rng.choice([1, 1, 1, 2, 2, 3]))
    free = names[0] not in NEEDS_MODEL | GIVEN
    others = [p for p in PLACES if p not in (place, "forward")] if free else []
    lines = ["", ""]
    for changes in (FEATURES[name].changes for name in names):
        lines += [*(changes if len(changes) < 3 else rng.sample(changes, 2)), ""]
    return names, place, rng.choice(others) if others and rng.random() < 0.3 else "forward", lines[:8]


FILE = tempfile.NamedTemporaryFile("w", suffix=".txt")
os.environ.setdefault("FUZZ_FILE", FILE.name)
FILE.write("1.0")
FILE.flush()


def call(world: dict, number: int) -> torch.Tensor:
    start_draws("a call")
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        return world["model"](x, world["CONTEXT"])


def apart(names, place, other, lines) -> tuple[list[float], str | None]:
    """Differences of each call, and why the model ran line by line, if it did."""
    theirs, ours = make_world(names, place, other), make_world(names, place, other)
    diffusers.tpu.install(ours["model"])
    found = []
    for number, line in enumerate(lines):
        environment = dict(os.environ)
        for world in (theirs, ours):
            os.environ.clear()
            os.environ.update(environment)
            exec(line.replace("ctx.", "CONTEXT."), world)
        want, got = call(theirs, number), call(ours, number)
        found.append(float((got - want).norm() / want.norm().clamp_min(1e-9)))
    return found, next(iter(ours["model"]._tpu_runner.eager), None)


STEADY = sorted(name for name, feature in FEATURES.items() if feature.steady and name not in GIVEN)
KEEPING = sorted(name for name, feature in FEATURES.items() if not feature.steady)
CHUNKS = [[n for n in STEADY if n not in NEEDS_MODEL][k::6] for k in range(6)]
CHUNKS[0] += sorted(NEEDS_MODEL)
WORLDS = 500
WHERE = ["forward", "part", "processor", "hook", "own forward", "activation"]


@pytest.fixture
def changed(monkeypatch, chips):
    """A function: the differences of each call of a world after its lines, and why it ran line by line."""
    monkeypatch.setenv("FUZZ", "1")
    return lambda names, place, lines: apart(names, place, "forward", ["", *lines])


@pytest.mark.slow
def test_random_worlds(monkeypatch, chips):
    """As DIFFUSERS_TPU_TEST_SEED draws them; `-s` shows how many ran line by line."""
    rng, eager = random.Random(random.random()), 0
    for _ in range(WORLDS):
        world = draw(rng)
        monkeypatch.delenv("FUZZ", raising=False)
        found, why = apart(*world)
        assert max(found) < 1e-5, (world, found, why)
        eager += why is not None
    print(f"{WORLDS} worlds: 0 differ, {eager} ran line by line")
    assert 0 < eager < WORLDS / 2


@pytest.mark.idiom("user-code")
@pytest.mark.parametrize("names, place", [*zip(CHUNKS, WHERE)], ids=WHERE)
def test_what_code_of_the_users_reads_is_seen_when_it_changes(changed, names, place):
    lines = [line for name in names for line in FEATURES[name].changes]
    # Each state is called twice: one that is another in each call is no program's.
    found, why = changed(names, place, [line for change in lines for line in (change, "")])
    assert max(found) < 1e-5 and why is None, (names, found, why)


@pytest.mark.idiom("random-inside", "stores", "given-objects")
@pytest.mark.parametrize("name", sorted({*KEEPING, *GIVEN}))
def test_what_no_one_can_read_or_keeps_something_runs_line_by_line(changed, name):
    place = random.choice(("forward", "part", "processor")) if name in GIVEN else random.choice(WHERE)
    found, why = changed([name], place, ["", *FEATURES[name].changes, ""])
    assert max(found) < 1e-5, (place, found, why)
    assert why is not None or name in {*GIVEN, "default dict"}


class Writing(torch.nn.Module):
    def forward(self, x, table, cache):
        table[0] = x * 2
        cache["rows"][1:].add_(x)
        cache["last"] = [x, table]
        return x + table.sum()


def test_a_tensor_that_a_call_writes_into_is_the_callers(chips):
    results = []
    for model in (diffusers.tpu.install(Writing()), Writing()):
        x, table, cache = torch.arange(3.0), torch.ones(2, 3), {"rows": torch.ones(3, 3)}
        view = table[:, 1]
        for _ in range(2):
            answer = model(x, table, cache)
        assert cache["last"][1] is table
        results.append((answer, table, view, cache["rows"], cache["last"][0]))
    assert all(relative(*pair) < 1e-6 for pair in zip(*results))


def test_a_cache_that_is_filled_again_is_the_same_program(chips):
    """FLUX.2 klein's keys and values of reference images, an object of upstream's that is given back with its tensors."""
    theirs = Flux2Transformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    ).eval()  # fmt: skip
    theirs.transformer_blocks[0].attn.set_processor(Flux2KVAttnProcessor())
    theirs.single_transformer_blocks[0].attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    ours = diffusers.tpu.install(copy.deepcopy(theirs))
    image, text = torch.randn(2, 1, 9, 4), torch.randn(2, 1, 5, 32)

    def places(count: int) -> torch.Tensor:
        return torch.stack([torch.arange(count) * (n == 1) for n in range(4)], -1)[None].float()

    def answers(model, n: int) -> list[torch.Tensor]:
        given = {
            "encoder_hidden_states": text[n], "txt_ids": places(5), "timestep": torch.tensor([0.7]),
            "guidance": torch.ones(1), "return_dict": False,
        }  # fmt: skip
        found, cache = model(image[n], img_ids=places(9), kv_cache_mode="extract", num_ref_tokens=3, **given)
        assert type(cache) is Flux2KVCache and cache.num_ref_tokens == 3
        later = {"hidden_states": image[n, :, 3:], "img_ids": places(6), "kv_cache_mode": "cached", "kv_cache": cache}
        found = [found.clone(), model(**given, **later)[0].clone()]
        cache.double_block_caches[0].k_ref = cache.double_block_caches[0].k_ref * 2
        return [*found, model(**given, **later)[0]]

    for n in range(2):
        with torch.no_grad():
            pairs = zip(answers(ours, n), answers(theirs, n))
        assert max(relative(*pair) for pair in pairs) < 1e-5
    assert programs_of(ours._tpu_runner) == 2 and not ours._tpu_runner.eager


def test_no_forward_of_upstreams_reads_what_loaders_note():
    reading = set()
    for path in {*(ROOT / "src/diffusers/models").rglob("*.py")} - {ROOT / "src/diffusers/models/lora.py"}:  # layers
        classes = [one for one in ast.parse(path.read_text()).body if isinstance(one, ast.ClassDef)]
        for function in (one for cls in classes for one in cls.body if isinstance(one, ast.FunctionDef)):
            if function.name in ("forward", "__call__", "encode", "decode"):
                reading |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    assert len(reading) > 1000 and not reading & key.OF_LOADERS


class Choosing(torch.nn.Module):
    def __init__(self, first: bool):
        super().__init__()
        self.inner = Chosen(first)

    def forward(self, x, y):
        return self.inner(x, y) * (2.0 if float(x.sum()) > 1e9 else 1.0)  # its own lines run one by one


class Chosen(torch.nn.Module):
    def __init__(self, first: bool):
        super().__init__()
        self.first = first

    def forward(self, x, y):
        return (x if self.first else y) * 3


def test_parts_of_one_text_that_use_other_arguments_are_two_programs(chips, own_store):
    for first in (True, False):
        model, x, y = Choosing(first), torch.randn(2, 3), torch.randn(2, 3)
        theirs = model(x, y)
        assert relative(diffusers.tpu.install(model)(x, y), theirs) < 1e-6


class Tripled:
    def __call__(self, x):
        return x * 3


class Held(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tripled = Tripled()

    def forward(self, x):
        return self.tripled(x)


def test_a_class_that_holds_its_model_does_not_keep_it(chips, new_garbage):
    def used() -> weakref.ref:
        model = Held()
        model.tripled = type("Scaled", (), {"__call__": lambda self, x: x * len([*model.children()]) + 1})()
        diffusers.tpu.install(model)(torch.ones(3))
        return weakref.ref(model)

    reference = used()
    gc.collect()
    assert reference() is None


def test_what_python_adds_to_a_class_is_no_change(chips, own_store):
    """`copy` and `pickle` leave names of slots in a class, `__annotations__` is made when somebody asks."""
    model, x = diffusers.tpu.install(Held()), torch.randn(2, 3)
    for asked in (lambda: None, lambda: copy.copy(model.tripled), lambda: Tripled.__annotations__):
        asked()
        assert relative(model(x), x * 3) < 1e-6
    assert {"__slotnames__", "__annotations__"} <= {*vars(Tripled)} and programs_of(model._tpu_runner) == 1
    Tripled.__call__ = lambda self, x: x * 5
    assert relative(model(x), x * 5) < 1e-6 and programs_of(model._tpu_runner) == 2
