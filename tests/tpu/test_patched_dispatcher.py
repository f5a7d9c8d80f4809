"""The attention backend `tpu`. Oracle: a recorder in the place of our attention gets what the dispatcher was given."""

import inspect
import sys
import types

import pytest
import torch

import diffusers.tpu
from diffusers import WanTransformer3DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from diffusers.tpu.config import ATTENTIONS


def attention_inputs(heads: int = 4, kv_heads: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": (2, 5, heads, 8), "key": (2, 7, kv_heads, 8), "value": (2, 7, kv_heads, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def dispatched(monkeypatch) -> list[dict]:
    """The TPU path switched on, with a recorder in the place of its attention."""
    calls = []

    def record(query, key, value, **options):
        calls.append({"query": query, "key": key, "value": value, **options})
        return query + 1

    room = types.ModuleType("diffusers.tpu.bridge")
    room.dispatched_attention = record
    monkeypatch.setitem(sys.modules, "diffusers.tpu.bridge", room)
    monkeypatch.setattr(diffusers.tpu, "is_active", lambda: True)
    return calls


@pytest.mark.parametrize("backend, kernel", [("tpu", None), ("tpu_online", "online"), ("tpu_splash", "splash")])
def test_every_argument_reaches_the_tpu(dispatched, backend, kernel):
    inputs = attention_inputs()
    options = {
        "attn_mask": torch.ones(2, 7, dtype=torch.bool),
        "dropout_p": 0.25,
        "is_causal": True,
        "scale": 0.5,
        "enable_gqa": True,
    }
    output = dispatch_attention_fn(**inputs, **options, attention_kwargs={"return_lse": True}, backend=backend)
    assert torch.equal(output, inputs["query"] + 1)
    assert dispatched == [{**inputs, **options, "return_lse": True, "kernel": kernel}]
    for name in (*inputs, "attn_mask"):
        assert dispatched[0][name] is {**inputs, **options}[name]


def test_the_tpu_function_names_every_argument_of_the_dispatcher():
    offered = {*inspect.signature(dispatch_attention_fn).parameters} - {
        "attention_kwargs",
        "backend",
        "parallel_config",
    }
    for backend in (AttentionBackendName.TPU, AttentionBackendName.TPU_ONLINE, AttentionBackendName.NATIVE):
        taken = attention_dispatch._AttentionBackendRegistry._supported_arg_names[backend]
        assert taken - {"_backend"} == offered | {"return_lse", "_parallel_config"}


def test_the_tpus_are_more_backends(upstream):
    theirs = upstream("diffusers.models.attention_dispatch")
    assert {name.value for name in AttentionBackendName} - {name.value for name in theirs.AttentionBackendName} == {
        "tpu",
        *(f"tpu_{name}" for name in ATTENTIONS if name != "auto"),
    }
    assert set(attention_dispatch._AttentionBackendRegistry._backends) == set(AttentionBackendName)


def test_context_manager_selects_the_tpu(dispatched):
    inputs = attention_inputs(kv_heads=4)
    with attention_backend("tpu"):
        dispatch_attention_fn(**inputs)
    assert len(dispatched) == 1
    native = dispatch_attention_fn(**inputs)
    assert len(dispatched) == 1 and not torch.equal(native, inputs["query"] + 1)


def make_wan() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=8,
        ffn_dim=16,
        num_layers=1,
        rope_max_seq_len=32,
    )


def test_set_attention_backend_selects_the_tpu(dispatched):
    model = make_wan()
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 4, 4),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": torch.randn(1, 6, 12),
    }
    model.set_attention_backend("tpu")
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        model.set_attention_backend("native")
    assert [tuple(call["key"].shape) for call in dispatched] == [(1, 8, 2, 12), (1, 6, 2, 12)]
    model(**inputs)
    assert len(dispatched) == 2


def test_the_tpu_takes_no_parallel_config(dispatched):
    with pytest.raises(NotImplementedError, match="parallel_config"):
        dispatch_attention_fn(**attention_inputs(), backend="tpu", parallel_config=object())


def test_the_tpu_backend_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(diffusers.tpu, "is_active", lambda: False)
    with pytest.raises(RuntimeError, match="'tpu' expects the TPU path.*DIFFUSERS_TPU=cpu"):
        make_wan().set_attention_backend("tpu")
    with pytest.raises(RuntimeError, match="'tpu' expects the TPU path"):
        with attention_backend("tpu"):
            pass
