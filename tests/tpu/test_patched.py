"""Upstream's patched files. Oracles: upstream's own modules in the same process, bit for bit; a recorder in the place of our attention."""

import inspect
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import diffusers.tpu
import tiny
from conftest import assert_same
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from diffusers.models.transformers import transformer_hunyuan_video15 as hunyuan15
from diffusers.schedulers import scheduling_helios, scheduling_unipc_multistep
from diffusers.tpu.common.config import ATTENTIONS


# The attention backend `tpu`: a recorder gets what the dispatcher was given


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

    room = types.ModuleType("diffusers.models.attention_dispatch_flax")
    room.dispatched_attention = record
    monkeypatch.setitem(sys.modules, room.__name__, room)
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


# The two patches of the HunyuanVideo-1.5 transformer


@pytest.fixture(scope="module")
def hunyuan15_pair(upstream):
    """Ours, and upstream's with its weights."""
    theirs = upstream("diffusers.models.transformers.transformer_hunyuan_video15").HunyuanVideo15Transformer3DModel
    cls = hunyuan15.HunyuanVideo15Transformer3DModel
    names = list(inspect.signature(cls.forward).parameters)
    assert names == [*inspect.signature(theirs.forward).parameters, "is_t2v"]  # positions stay
    sizes = {"in_channels": 5, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    sizes |= {"text_embed_dim": 12, "text_embed_2_dim": 10, "image_embed_dim": 8, "num_refiner_layers": 1}
    ours, theirs = (made(**sizes, rope_axes_dim=(4, 6, 6)).eval() for made in (cls, theirs))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


MASKS = {  # of so many tokens
    "valid": lambda length: torch.ones(3, length),
    "padding": lambda length: torch.zeros(3, length),
    "right-padded": lambda length: torch.arange(length) < torch.randint(0, length + 1, (3, 1)),
    "scattered": lambda length: torch.randint(0, 2, (3, length)),
}


def hunyuan15_inputs(text_mask: str, byt5_mask: str, image: str) -> dict:
    return {
        "hidden_states": torch.randn(3, 5, 2, 4, 3), "timestep": torch.tensor([7.0] * 3), "return_dict": False,
        "encoder_hidden_states": torch.randn(3, 11, 12), "encoder_attention_mask": MASKS[text_mask](11).long(),
        "encoder_hidden_states_2": torch.randn(3, 7, 10), "encoder_attention_mask_2": MASKS[byt5_mask](7).long(),
        "image_embeds": torch.randn(3, 5, 8) * (image == "image"),
    }  # fmt: skip


def run_hunyuan15(model, inputs: dict, **more) -> list[torch.Tensor]:
    """The output, and what the first block got: hidden states of video and text, modulation, mask."""
    seen = []
    hook = model.transformer_blocks[0].register_forward_pre_hook(lambda _, args: seen.extend(args[:4]))
    with torch.no_grad():
        output = model(**inputs, **more)[0]
    hook.remove()
    return [output, *seen]


@pytest.mark.parametrize("image", ["image", "no image"])
@pytest.mark.parametrize("text_mask, byt5_mask", [*zip(MASKS, MASKS), *zip(MASKS, [*MASKS][1:] + ["valid"])])
def test_hunyuan15_equals_upstream(hunyuan15_pair, text_mask, byt5_mask, image):
    ours, theirs = hunyuan15_pair
    inputs = hunyuan15_inputs(text_mask, byt5_mask, image)
    expected = run_hunyuan15(theirs, inputs)
    assert expected[2].shape[1] == 5 + 7 + 11 and expected[4].dtype == torch.bool
    assert_same(run_hunyuan15(ours, inputs), expected)
    assert_same(run_hunyuan15(ours, inputs, is_t2v=image == "no image"), expected)


def test_hunyuan15_is_t2v_overrules_the_values(hunyuan15_pair):
    ours, theirs = hunyuan15_pair
    inputs = hunyuan15_inputs("scattered", "right-padded", "image")
    without = inputs | {"image_embeds": torch.zeros_like(inputs["image_embeds"])}
    assert_same(run_hunyuan15(ours, inputs, is_t2v=True), run_hunyuan15(theirs, without))
    kept = run_hunyuan15(ours, without, is_t2v=False)
    assert kept[4].sum() == run_hunyuan15(theirs, inputs)[4].sum() == run_hunyuan15(theirs, without)[4].sum() + 3 * 5


def test_hunyuan15_padding_that_is_not_a_number_is_zeroed(hunyuan15_pair):
    inputs = hunyuan15_inputs("valid", "right-padded", "image")
    inputs["encoder_attention_mask_2"][0, -2:] = 0
    inputs["encoder_hidden_states_2"][0, -1] = float("nan")
    ours, expected = (run_hunyuan15(model, inputs) for model in hunyuan15_pair)
    assert expected[2].isfinite().all()
    assert_same(ours, expected)


def test_hunyuan15_runs_without_values(hunyuan15_pair):
    """With is_t2v given nothing asks for a value: neither a branch nor a shape."""
    inputs = hunyuan15_inputs("scattered", "scattered", "no image")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        assert hunyuan15_pair[0](**fake, is_t2v=True)[0].shape == (3, 4, 2, 4, 3)
        with pytest.raises(DataDependentOutputException):
            hunyuan15_pair[0](**fake)


# UniPC and Helios, whose systems are solved in float32 at least


def denoise(scheduler, dtype, steps: int = 7, cast=None, **options) -> list[torch.Tensor]:
    """The sample after every step, with a fixed sequence of model outputs."""
    scheduler.set_timesteps(steps, **options)
    if cast is not None:
        scheduler.sigmas = scheduler.sigmas.to(cast)
    generator = torch.Generator().manual_seed(steps)
    sample = torch.randn(2, 3, 2, 4, 5, generator=generator).to(dtype)
    samples = []
    for timestep in scheduler.timesteps:
        output = torch.randn(sample.shape, generator=generator).to(dtype)
        sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
        samples.append(sample)
    return samples


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULERS = {
    "unipc, wan": {**FLOW, "flow_shift": 3.0},
    "unipc, order 3": {**FLOW, "solver_order": 3},
    "unipc, epsilon, bh1": {"solver_order": 3, "solver_type": "bh1"},
    "unipc, epsilon of the noise": {"solver_order": 3, "predict_x0": False},
    "unipc, karras": {"solver_order": 3, "use_karras_sigmas": True},
    "helios, three stages": {},
    "helios, one stage, bh1": {"solver_order": 3, "stages": 1, "stage_range": [0, 1], "solver_type": "bh1"},
}


def make_schedulers(upstream, name: str):
    """(ours, upstream's, what `set_timesteps` takes more)."""
    options = SCHEDULERS[name]
    if name.startswith("unipc"):
        theirs = upstream("diffusers.schedulers.scheduling_unipc_multistep").UniPCMultistepScheduler
        return scheduling_unipc_multistep.UniPCMultistepScheduler(**options), theirs(**options), {}
    theirs = upstream("diffusers.schedulers.scheduling_helios").HeliosScheduler
    options = {"scheduler_type": "unipc", **options}
    return scheduling_helios.HeliosScheduler(**options), theirs(**options), {"stage_index": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_denoising_equals_upstream(upstream, name, dtype):
    ours, theirs, more = make_schedulers(upstream, name)
    assert_same(denoise(ours, dtype, **more), denoise(theirs, dtype, **more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_bfloat16_sigmas_are_solved_in_float32(upstream, monkeypatch, name, dtype):
    """Upstream with a `solve` that widens by itself is the oracle; upstream as it is fails where it solves at all."""
    solve, dtypes = torch.linalg.solve, []

    def widening(matrix, right):
        dtypes.append((matrix.dtype, right.dtype))
        return solve(matrix.float(), right.float())

    ours, theirs, more = make_schedulers(upstream, name)
    monkeypatch.setattr(torch.linalg, "solve", widening)
    expected = denoise(theirs, dtype, cast=torch.bfloat16, **more)
    assert dtypes and torch.bfloat16 in {right for _, right in dtypes}
    dtypes.clear()
    samples = denoise(ours, dtype, cast=torch.bfloat16, **more)
    assert set(dtypes) == {(torch.float32, torch.float32)}
    assert_same(samples, expected)
    assert {sample.dtype for sample in samples} == {dtype}

    monkeypatch.setattr(torch.linalg, "solve", solve)
    assert_same(denoise(ours, dtype, cast=torch.bfloat16, **more), expected)
    with pytest.raises(RuntimeError, match="dtype|BFloat16"):
        denoise(make_schedulers(upstream, name)[1], dtype, cast=torch.bfloat16, **more)
