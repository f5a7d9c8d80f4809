"""Oracle: the same script without the path, its Python changed by the same lines (`key_fuzz.py` has them)."""

import ast
import copy
import random

import pytest
import torch

import diffusers.tpu
import key_fuzz
from conftest import ROOT, programs_of, relative
from diffusers import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor
from diffusers.tpu.compile.state import key


STEADY = sorted(name for name, feature in key_fuzz.FEATURES.items() if feature.steady and name not in key_fuzz.GIVEN)
KEEPING = sorted(name for name, feature in key_fuzz.FEATURES.items() if not feature.steady)
CHUNKS = [[n for n in STEADY if n not in key_fuzz.NEEDS_MODEL][k::6] for k in range(6)]
CHUNKS[0] += sorted(key_fuzz.NEEDS_MODEL)
PLACES = ["forward", "part", "processor", "hook", "own forward", "activation"]


@pytest.fixture
def changed(monkeypatch, chips):
    """A function: the differences of each call of a world after its lines, and why it ran line by line."""
    monkeypatch.setenv("FUZZ", "1")

    def differ(names, place, lines):
        return key_fuzz.apart(names, place, "forward", ["", *lines], diffusers.tpu.install)

    return differ


@pytest.mark.idiom("user-code")
@pytest.mark.parametrize("names, place", [*zip(CHUNKS, PLACES)], ids=PLACES)
def test_what_code_of_the_users_reads_is_seen_when_it_changes(changed, names, place):
    lines = [line for name in names for line in key_fuzz.FEATURES[name].changes]
    # Each state is called twice: one that is another in each call is no program's.
    found, why = changed(names, place, [line for change in lines for line in (change, "")])
    assert max(found) < 1e-5 and why is None, (names, found, why)


@pytest.mark.idiom("random-inside", "stores", "given-objects")
@pytest.mark.parametrize("name", sorted({*KEEPING, *key_fuzz.GIVEN}))
def test_what_no_one_can_read_or_keeps_something_runs_line_by_line(changed, name):
    place = random.choice(("forward", "part", "processor")) if name in key_fuzz.GIVEN else random.choice(PLACES)
    found, why = changed([name], place, ["", *key_fuzz.FEATURES[name].changes, ""])
    assert max(found) < 1e-5, (place, found, why)
    assert why is not None or name in {*key_fuzz.GIVEN, "default dict"}


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
    """FLUX.2 klein's keys and values of reference images."""
    theirs = Flux2Transformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    ).eval()  # fmt: skip
    theirs.transformer_blocks[0].attn.set_processor(Flux2KVAttnProcessor())
    theirs.single_transformer_blocks[0].attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    ours = diffusers.tpu.install(copy.deepcopy(theirs))
    image, text = torch.randn(3, 1, 9, 4), torch.randn(3, 1, 5, 32)

    def places(count: int) -> torch.Tensor:
        return torch.stack([torch.arange(count) * (n == 1) for n in range(4)], -1)[None].float()

    def answers(model, n: int) -> list[torch.Tensor]:
        given = {
            "encoder_hidden_states": text[n], "txt_ids": places(5), "timestep": torch.tensor([0.7]),
            "guidance": torch.ones(1), "return_dict": False,
        }  # fmt: skip
        found, cache = model(image[n], img_ids=places(9), kv_cache_mode="extract", num_ref_tokens=3, **given)
        later = {"hidden_states": image[n, :, 3:], "img_ids": places(6), "kv_cache_mode": "cached", "kv_cache": cache}
        found = [found.clone(), model(**given, **later)[0].clone()]
        cache.double_block_caches[0].k_ref = cache.double_block_caches[0].k_ref * 2
        return [*found, model(**given, **later)[0]]

    for n in range(3):
        with torch.no_grad():
            pairs = zip(answers(ours, n), answers(theirs, n))
        assert max(relative(*pair) for pair in pairs) < 1e-5
    assert programs_of(ours._tpu_runner) == 2 and not ours._tpu_runner.eager


def test_no_forward_of_upstreams_reads_what_loaders_note():
    reading = set()
    for path in {*(ROOT / "src/diffusers/models").rglob("*.py")} - {ROOT / "src/diffusers/models/lora.py"}:  # layers
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name in ("forward", "__call__", "encode", "decode"):
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


def test_what_python_adds_to_a_class_is_no_change(chips, own_store):
    """`copy` and `pickle` leave names of slots in a class, `__annotations__` is made when somebody asks."""
    model, x = diffusers.tpu.install(Held()), torch.randn(2, 3)
    for asked in (lambda: None, lambda: copy.copy(model.tripled), lambda: Tripled.__annotations__):
        asked()
        assert relative(model(x), x * 3) < 1e-6
    assert {"__slotnames__", "__annotations__"} <= {*vars(Tripled)} and programs_of(model._tpu_runner) == 1
    Tripled.__call__ = lambda self, x: x * 5
    assert relative(model(x), x * 5) < 1e-6 and programs_of(model._tpu_runner) == 2
