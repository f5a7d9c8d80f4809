"""The attention backend `tpu`. Oracle: a recorder in the place of our attention gets what the dispatcher was given."""

import inspect
import sys
import types

import pytest
import torch

import diffusers.tpu
import tiny
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
    options = {"attn_mask": torch.ones(2, 7, dtype=torch.bool), "dropout_p": 0.25, "is_causal": True}
    options |= {"scale": 0.5, "enable_gqa": True}
    output = dispatch_attention_fn(**inputs, **options, attention_kwargs={"return_lse": True}, backend=backend)
    assert torch.equal(output, inputs["query"] + 1)
    assert dispatched == [{**inputs, **options, "return_lse": True, "kernel": kernel}]
    for name in (*inputs, "attn_mask"):
        assert dispatched[0][name] is {**inputs, **options}[name]


def test_the_tpus_are_more_backends_whose_functions_take_every_argument(upstream):
    own = {"attention_kwargs", "backend", "parallel_config"}
    offered = {*inspect.signature(dispatch_attention_fn).parameters} - own
    for backend in (AttentionBackendName.TPU, AttentionBackendName.TPU_ONLINE, AttentionBackendName.NATIVE):
        taken = attention_dispatch._AttentionBackendRegistry._supported_arg_names[backend]
        assert taken - {"_backend"} == offered | {"return_lse", "_parallel_config"}
    theirs = {name.value for name in upstream("diffusers.models.attention_dispatch").AttentionBackendName}
    ours = {"tpu", *(f"tpu_{name}" for name in ATTENTIONS if name != "auto")}
    assert {name.value for name in AttentionBackendName} - theirs == ours
    assert set(attention_dispatch._AttentionBackendRegistry._backends) == set(AttentionBackendName)


def test_context_manager_and_model_select_the_tpu(dispatched):
    inputs = attention_inputs(kv_heads=4)
    with attention_backend("tpu"):
        dispatch_attention_fn(**inputs)
    assert len(dispatched) == 1
    native = dispatch_attention_fn(**inputs)
    assert len(dispatched) == 1 and not torch.equal(native, inputs["query"] + 1)
    with pytest.raises(NotImplementedError, match="parallel_config"):
        dispatch_attention_fn(**inputs, backend="tpu", parallel_config=object())
    model = tiny.wan_transformer()
    given = {"hidden_states": torch.randn(1, 16, 2, 4, 4), "timestep": torch.tensor([5])}
    given["encoder_hidden_states"] = torch.randn(1, 6, 32)
    model.set_attention_backend("tpu")
    try:
        with torch.no_grad():
            model(**given)
    finally:
        model.set_attention_backend("native")
    assert [tuple(call["key"].shape) for call in dispatched[1:]] == [(1, 8, 4, 12), (1, 6, 4, 12)] * 3
    model(**given)
    assert len(dispatched) == 7


def test_the_tpu_backend_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(diffusers.tpu, "is_active", lambda: False)
    with pytest.raises(RuntimeError, match="'tpu' expects the TPU path.*DIFFUSERS_TPU=cpu"):
        tiny.wan_transformer().set_attention_backend("tpu")
    with pytest.raises(RuntimeError, match="'tpu' expects the TPU path"), attention_backend("tpu"):
        pass
