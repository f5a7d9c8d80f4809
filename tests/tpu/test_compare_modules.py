"""Where two forms of a component part. Oracle: faults that are planted, whose place is known; a harvest by hand."""

import ast
import copy
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec
from transformers.models.umt5.modeling_umt5 import UMT5Attention, UMT5LayerNorm

import tiny
from diffusers import UNet2DConditionModel, WanTransformer3DModel, tpu
from diffusers.models.autoencoders import autoencoder_kl_wan_nnx_layers_flax
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers import transformer_wan, transformer_wan_flax
from diffusers.tpu import bridge
from diffusers.tpu import compare as fidelity
from diffusers.tpu.apps.cli import main
from diffusers.tpu.chips.figures import find_topology
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.compare import Form, roundings
from diffusers.tpu.compare.forms import Value
from diffusers.tpu.compare.harvest import harvest
from diffusers.tpu.compare.matching import error_of, measured
from diffusers.tpu.compare.modules import compared, graded, innermost
from diffusers.tpu.compare.roundings import MOST, Widening, widening
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.compile.tracing import Tag, capture
from diffusers.tpu.pipelines.components import modules_of
from diffusers.tpu.pipelines.plans import module_plan
from diffusers.tpu.planner import aot
from diffusers.tpu.video.convolution import PRODUCTS, as_bfloat16_products
from diffusers.tpu.video.nnx.layers import RMSNorm


pytestmark = pytest.mark.usefixtures("chips")


@functools.cache
def recorded(name: str, component: str, entry: str = "forward"):
    """(the component of a tiny pipeline, a call of it, what upstream's gives, submodule by submodule)."""
    pipe = fidelity.load(tiny.make(name), torch.float32)
    arguments = {
        key: value for key, value in tiny.arguments(name, num_inference_steps=1).items() if key != "generator"
    }
    calls, _ = fidelity.record(pipe, arguments, 5)
    call = next(call for call in calls if (call.module, call.entry) == (component, entry))
    module = modules_of(pipe)[component]
    return module, call, fidelity.run_form(module, Form("upstream"), call)


# Faults: what is changed of ours, given a copy of the module and pytest's monkeypatch


def dropped_bias(name):
    def plant(module, patch):
        module.get_submodule(name).bias.data.zero_()

    return plant


def transposed_kernel(name, axes=(0, 1)):
    def plant(module, patch):
        weight = module.get_submodule(name).weight
        weight.data = weight.data.transpose(*axes).contiguous()

    return plant


def norm_over_tokens(cls):
    def forward(norm, x):
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)

    return lambda module, patch: patch.setattr(cls, "forward", forward)


def swapped_pairs(module, patch):
    """Entries half a head apart are rotated in place of neighbours, or the other way round."""
    ours = bridge.normed_and_rotated
    patch.setattr(bridge, "normed_and_rotated", lambda x, norm, *t, apart=False: ours(x, norm, *t, apart=not apart))


def masked_key(owner):
    """The last key is left out."""

    def plant(module, patch):
        theirs = owner.dispatch_attention_fn
        patch.setattr(
            owner,
            "dispatch_attention_fn",
            lambda q, k, v, *args, **more: theirs(q, k[:, :-1], v[:, :-1], *args, **more),
        )

    return plant


def masked_text(module, patch):
    """The first token of the text is left out of a softmax over two streams."""
    ours = bridge.joint_attention

    def joint(latents, text, seen, backend=None):
        seen = torch.ones(text[1].shape[:2], dtype=torch.bool, device=text[1].device) if seen is None else seen.bool()
        return ours(latents, text, seen & (torch.arange(seen.shape[1], device=seen.device) > 0), backend)

    patch.setattr(bridge, "joint_attention", joint)


def masked_word(module, patch):
    """No token attends to the first one."""
    forward = UMT5Attention.forward

    def masked(attention, hidden_states, *args, attention_mask=None, **more):
        keys = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return forward(attention, hidden_states, *args, attention_mask=attention_mask - 1e9 * (keys == 0), **more)

    patch.setattr(UMT5Attention, "forward", masked)


def norm_over_rows(module, patch):
    patch.setattr(RMSNorm, "__call__", lambda norm, x: (x - x.mean(2, keepdims=True)) / x.std(2, keepdims=True))


def masked_position(module, patch):
    """The first position of a map is left out."""
    attention = autoencoder_kl_wan_nnx_layers_flax.attention
    patch.setattr(
        autoencoder_kl_wan_nnx_layers_flax,
        "attention",
        lambda q, k, v, mask: attention(q, k[:, :, 1:], v[:, :, 1:], mask=mask),
    )


WAN, HUNYUAN, COG = ("wan", "transformer"), ("hunyuan15", "transformer"), ("cogvideox", "transformer")
TEXT, VAE = ("wan", "text_encoder"), ("wan", "vae", "decode")
FAULTS = [  # one of each kind and of each component in the fast set
    (WAN, "scanned", swapped_pairs, "blocks.0.attn1"),
    (WAN, "scanned", masked_key(transformer_wan), "blocks.0.attn2"),
    (WAN, "torchax", dropped_bias("blocks.1.attn2.to_q"), "blocks.1.attn2.to_q"),
    (HUNYUAN, "scanned", norm_over_tokens(torch.nn.LayerNorm), "context_embedder.token_refiner.refiner_blocks.0.norm1"),
    (HUNYUAN, "scanned", masked_text, "transformer_blocks.0.attn"),
    (COG, "scanned", dropped_bias("transformer_blocks.1.norm2.linear"), "transformer_blocks.1.norm2.linear"),
    (COG, "scanned", transposed_kernel("transformer_blocks.1.attn1.to_q"), "transformer_blocks.1.attn1.to_q"),
    (TEXT, "scanned", masked_word, "encoder.block.0.layer.0.SelfAttention"),
    (VAE, "nnx", norm_over_rows, "decoder.mid_block.resnets.0.norm1"),
]  # fmt: skip
MORE = [
    (WAN, "scanned", dropped_bias("blocks.1.ffn.net.2"), "blocks.1.ffn.net.2"),
    (WAN, "scanned", norm_over_tokens(FP32LayerNorm), "blocks.0.norm1"),
    (WAN, "scanned", transposed_kernel("blocks.2.attn1.to_out.0"), "blocks.2.attn1.to_out.0"),
    (WAN, "scanned", masked_key(transformer_wan_flax), "blocks.0.attn1"),
    (HUNYUAN, "scanned", swapped_pairs, "transformer_blocks.0.attn"),
    (HUNYUAN, "scanned", dropped_bias("transformer_blocks.1.attn.add_k_proj"), "transformer_blocks.1.attn.add_k_proj"),
    (HUNYUAN, "scanned", transposed_kernel("transformer_blocks.2.attn.to_v"), "transformer_blocks.2.attn.to_v"),
    (COG, "scanned", swapped_pairs, "transformer_blocks.0.attn1"),
    (COG, "scanned", norm_over_tokens(torch.nn.LayerNorm), "transformer_blocks.0.norm1.norm"),
    (COG, "scanned", masked_text, "transformer_blocks.0.attn1"),
    (TEXT, "scanned", transposed_kernel("encoder.block.1.layer.0.SelfAttention.q"), "encoder.block.1.layer.0.SelfAttention.q"),
    (TEXT, "scanned", norm_over_tokens(UMT5LayerNorm), "encoder.block.0.layer.0.layer_norm"),
    (VAE, "scanned", dropped_bias("decoder.mid_block.resnets.1.conv2"), "decoder.mid_block.resnets.1.conv2"),
    (VAE, "nnx", transposed_kernel("decoder.up_blocks.1.resnets.0.conv1", (-1, -2)), "decoder.up_blocks.1.resnets.0.conv1"),
    (VAE, "nnx", masked_position, "decoder.mid_block.attentions.0"),
    (VAE, "nnx", dropped_bias("decoder.mid_block.attentions.0.to_qkv"), "decoder.mid_block.attentions.0.to_qkv"),
]  # fmt: skip


@pytest.mark.parametrize(
    "which, kind, plant, name",
    [
        pytest.param(
            *fault, id="-".join((*fault[0][:2], fault[1], fault[3])), marks=() if fault in FAULTS else pytest.mark.slow
        )
        for fault in (*FAULTS, *MORE)
    ],
)
def test_the_submodule_with_a_planted_fault_is_named_first(which, kind, plant, name, monkeypatch):
    module, call, oracle = recorded(*which)
    ours = copy.deepcopy(module)
    plant(ours, monkeypatch)
    found = fidelity.run_form(ours, Form(kind), call)
    comparison = compared(oracle, found, None, call, kind, "upstream")
    assert comparison.first == name and not comparison.ok
    assert graded(next(row for row in comparison.rows if row.name == name).error.relative) in (
        "attention",
        "severe",
        "warning",
    )


def test_equal_weights_part_nowhere_and_every_scanned_block_is_there():
    for which, kind in ((WAN, "scanned"), (WAN, "torchax"), (VAE, "nnx")):
        module, call, oracle = recorded(*which)
        found = fidelity.run_form(module, Form(kind), call)
        comparison = compared(oracle, found, None, call, kind, "upstream")
        assert comparison.ok and max(row.error.relative for row in comparison.rows) < 3e-6, comparison.first  # 1.2e-6
        if which is WAN:
            blocks = {name.split(".")[1] for name in found.by_name if name.startswith("blocks.")}
            assert blocks == {"0", "1", "2"} and len(comparison.rows) == 86
            assert {*comparison.left_out} == {f"blocks.{n}.attn1.norm_{x}" for n in range(3) for x in "qk"}


def of_bfloat16_products(precision: str):
    """A stub of the chips' float32 convolution: the products that a TPU makes of it at this precision."""

    def run(x, w):
        x, w = as_bfloat16_products(x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), PRODUCTS[precision])
        layout = ("NHWC", "HWIO", "NCHW")
        return lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=layout, preferred_element_type=np.float32
        )

    return run


def test_limits_are_wider_by_what_the_chips_float32_is_less_exact(monkeypatch):
    assert widening(jax.devices()[0], "highest", "high") == Widening()
    monkeypatch.setattr(roundings, "_rounds_as_the_host", lambda device: False)
    made = {}
    for precision in ("high", "default"):
        monkeypatch.setattr(roundings, "_convolved", of_bfloat16_products(precision))
        made[precision] = widening.__wrapped__(jax.devices()[0], "highest", "high")
    assert 1 <= made["high"].plain == made["default"].plain < 8  # the CPU's own
    assert 8 < made["high"].convolutions < MOST["high"]  # measured: 32
    assert made["default"].convolutions == MOST["high"]  # less exact than it was asked for, which is no rounding
    _, call, oracle = recorded(*WAN)
    found = copy.deepcopy(oracle)
    for name in ("patch_embedding", "blocks.1.ffn.net.2", "blocks.1.ffn", ""):  # the last two: what these are part of
        (value,) = found.by_name[name][0].answered.values()
        value.array[...] *= 1 + 1e-5 * np.sign(np.random.default_rng(0).standard_normal(value.array.shape))
    first = [compared(oracle, found, None, call, "scanned", "upstream", w).first for w in (Widening(), made["high"])]
    assert first == ["patch_embedding", "blocks.1.ffn.net.2"]


def kernels_in(program) -> set[str]:
    """Names of the Pallas kernels of a traced program, also inside of loops, branches and parts of one chip."""
    found = set()
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.primitive.name == "pallas_call":
            found.add(equation.params["name"])
        for value in jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda x: isinstance(x, (ClosedJaxpr, Jaxpr))
        ):
            found |= kernels_in(value) if isinstance(value, (ClosedJaxpr, Jaxpr)) else set()
    return found


def kernels_of(module, call: dict, mesh) -> list[str]:
    """Those of the program that a run would compile; kernels leave short calls to the compiler, so models are wide."""
    runner = CompiledModule(module.bfloat16().eval(), module_plan(module), mesh, tpu.TPUConfig())
    runner.attach()
    taken = runner.flatten_call("forward", (), {**call, "return_dict": False})
    runner.current()
    return sorted(kernels_in(runner.trace(taken, 1).traced.jaxpr))


def denoiser(chips: int):
    """A Wan transformer of one block: attention, linear layers, norm with rotation; of several chips, exchanges."""
    dims = {"num_attention_heads": 16, "attention_head_dim": 128, "ffn_dim": 4096, "num_layers": 1}
    latents, text = torch.zeros(1, 16, 4 * chips, 64, 64).bfloat16(), torch.zeros(1, 128, 64).bfloat16()
    call = {"hidden_states": latents, "timestep": torch.tensor([500]), "encoder_hidden_states": text}
    return WanTransformer3DModel(**dims, text_dim=64, freq_dim=64, in_channels=16, out_channels=16), call


def unet():
    """A UNet of maps: convolutions."""
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "norm_num_groups": 16}
    sample, text = torch.zeros(1, 4, 64, 64).bfloat16(), torch.zeros(1, 8, 64).bfloat16()
    call = {"sample": sample, "timestep": torch.tensor(500), "encoder_hidden_states": text}
    return UNet2DConditionModel(
        **kinds, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=64
    ), call


def kernels_that_a_check_runs(argument, progress) -> dict:
    """Runs in a process of `aot.run_in_child`: chip by chip is what a run on it would trace."""
    one, four = (
        make_mesh(aot.Compiler(find_topology(name)).devices, mesh)
        for name, mesh in (("v5e-1", (1, 1, 1)), ("v6e-4", (1, 4, 1)))
    )
    return {"names": [kernels_of(*denoiser(1), one), kernels_of(*denoiser(4), four), kernels_of(*unet(), one)]}


@pytest.mark.slow
def test_small_models_whose_traces_hold_every_kernel(monkeypatch):
    """Oracle: the calls of Pallas in our sources, but for a benchmark's."""
    rooms = Path(aot.__file__).parent
    calls = (
        node
        for file in rooms.rglob("*.py")
        if "planner" not in file.parts
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "pallas_call"
    )
    written = {keyword.value.value for call in calls for keyword in call.keywords if keyword.arg == "name"}
    assert len(written) == 9
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    environment = {"DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_CACHE": "off"}
    function = f"{__name__}:kernels_that_a_check_runs"
    made = aot.run_in_child(function, {}, seconds=300, schedules=False, environment=environment)
    alone, together, maps = map(set, made["names"])
    assert alone | together | maps == written
    assert {"attention_kernel", "linear_kernel", "rotary_kernel"} <= alone and "linear_kernel_of_windows" in maps


def test_values_of_a_mesh_are_put_together():
    """A VAE whose chips hold slabs of the width, in chunks of frames; tokens over chips."""
    module, call, oracle = recorded(*VAE)
    found = fidelity.run_form(module, Form("nnx", mesh=(1, 2, 1)), call)
    comparison = compared(oracle, found, None, call, "nnx", "upstream")
    rows = {row.name: row for row in comparison.rows}
    assert comparison.ok and rows["decoder.conv_out"].chips == 2 and rows["decoder.conv_out"].spec == "a part a chip"
    module, call, oracle = recorded(*WAN)
    found = fidelity.run_form(module, Form("scanned", mesh=(1, 4, 1)), call)
    comparison = compared(oracle, found, None, call, "scanned", "upstream")
    rows = {row.name: row for row in comparison.rows}
    assert comparison.ok and rows["blocks.1.ffn"].spec == "P(-, sp, -)" and rows["blocks.1.ffn"].chips == 4


def test_a_component_whose_program_is_kept_is_traced_all_the_same():
    """A run before has left its program in the store, which has no values of submodules."""
    module, call, oracle = recorded(*WAN)
    ran = tpu.install(copy.deepcopy(module), tpu.TPUConfig(mesh=(1, 1, 1)))
    ran(*call.args, **call.kwargs)
    found = fidelity.run_form(module, Form("scanned"), call)
    assert compared(oracle, found, None, call, "scanned", "upstream").ok


def test_bfloat16_is_held_to_upstreams_own_error_in_each_submodule():
    pipe = tiny.wan()
    arguments = {
        key: value for key, value in tiny.arguments("wan", num_inference_steps=1).items() if key != "generator"
    }
    form = Form("scanned", torch.bfloat16)
    (comparison,) = fidelity.compare_component(pipe, "transformer", form, arguments=arguments, seed=5)
    rows = {row.name: row for row in comparison.rows}
    assert comparison.ok and all(row.own is not None for row in comparison.rows)
    assert 1e-3 < rows["blocks.1.ffn.net.2"].own < 2e-2 and rows["blocks.1.ffn.net.2"].limit > 1e-3
    assert pipe.transformer.patch_embedding.weight.dtype == torch.float32  # the pipeline is left as it is


def test_the_first_submodule_that_is_not_finite_is_named():
    module, call, oracle = recorded(*WAN)
    ours = copy.deepcopy(module)
    ours.blocks[1].ffn.net[2].weight.data[0, 0] = torch.nan
    found = fidelity.run_form(ours, Form("scanned"), call)
    comparison = compared(oracle, found, None, call, "scanned", "upstream")
    assert comparison.not_finite == comparison.first == "blocks.1.ffn.net.2" and not comparison.ok


def test_what_cannot_be_run_is_refused_with_the_way_out():
    module, call, _ = recorded(*WAN)
    with pytest.raises(ValueError, match="upstream, torchax, scanned"):
        fidelity.run_form(module, Form("nnx"), call)
    with pytest.raises(ValueError, match="expected a form among"):
        Form("jax")

    class Decides(torch.nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    with pytest.raises(NotImplementedError, match="compare --trace"):
        fidelity.run_form(Decides(), Form("torchax"), fidelity.Call("m", "forward", (torch.ones(2),), {}))


def test_harvest_by_hand(chips):
    """Marks in a scan, a compiled part, a part of each chip, a branch and an open loop; the program's own outputs with them."""
    mesh = jax.sharding.Mesh(np.array(chips[:2]), ("sp",))

    def program(weights, x):
        def step(carry, w):
            capture(carry * w, Tag("block", True, 0, 0))
            return carry * w + 1, carry

        x, befores = lax.scan(step, x, weights)
        x = jax.jit(lambda x: (capture(x, Tag("jit", True, 0, 1)), x * 2)[1])(x)
        local = jax.shard_map(
            lambda x: (capture(x, Tag("chip", True, 0, 2)), x + 1)[1],
            mesh=mesh,
            in_specs=PartitionSpec("sp"),
            out_specs=PartitionSpec("sp"),
        )
        x = local(x)
        x = lax.cond(x[0] > 0, lambda x: (capture(x, Tag("branch", True, 0, 3)), x)[1], lambda x: x, x)
        return lax.while_loop(
            lambda x: x[0] < 100, lambda x: (capture(x, Tag("loop", True, 0, 4)), x * 3)[1], x
        ), befores

    weights, x = np.float32([2, 3]), np.float32([1, 5])
    jaxpr = jax.jit(program).trace(weights, x).jaxpr
    places = []

    def run(*arguments):
        found = harvest(jaxpr, arguments)
        places.append(found)
        return found.outputs, found.values

    outputs, values = jax.jit(run)(weights, x)
    found = {place.tag.name: value for place, value in zip(places[-1].places, values)}
    assert {*found} == {"block", "jit", "chip"} and {tag.name for tag in places[-1].lost} == {"branch", "loop"}
    # x: 1, 5 -> 3, 11 -> 10, 34 -> 20, 68 -> 21, 69 -> 189, 621
    assert found["block"].tolist() == [[2, 10], [9, 33]] and found["jit"].tolist() == [10, 34]
    assert found["chip"].tolist() == [[20], [68]]
    assert outputs[0].tolist() == [189, 621] and outputs[1].tolist() == [[1, 5], [3, 11]]


LAYOUTS = {
    "channels last": ((2, 3, 4, 5, 6), lambda o: np.moveaxis(o, 1, -1)),
    "frames in the batch": ((6, 4, 5, 7), lambda o: o.reshape(2, 3, 4, 5, 7).transpose(0, 1, 3, 4, 2)),
    "an axis of one": ((1, 4, 5), lambda o: o.reshape(4, 5)),
    "frames before the first": ((1, 4, 1, 5, 6), lambda o: np.concatenate([0 * o, o], 2)),
    "tokens behind the last": ((2, 7, 4), lambda o: np.concatenate([o, 0 * o[:, :1]], 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_told_by_shapes(layout):
    shape, change = LAYOUTS[layout]
    o = np.random.default_rng(1).normal(size=shape)
    assert error_of([Value(change(o))], Value(o))[0].maximum == 0
    assert error_of([Value(change(o) + 0.5)], Value(o))[0].mean == pytest.approx(0.5)
    assert error_of([Value(o[..., :-1])], Value(o)) is None


def test_slabs_and_chunks_are_put_together():
    o = np.random.default_rng(2).normal(size=(1, 3, 4, 2, 6))
    slabs = np.stack([o[..., :4], o[..., 2:]])  # of two chips, two columns in common
    assert error_of([Value(slabs, by_chip=True)], Value(o))[0].maximum == 0
    assert error_of([Value(o[:, :, :1]), Value(o[:, :, 1:])], Value(o))[0].maximum == 0
    assert error_of([Value(o[:, :, 1:]), Value(o[:, :, :1])], Value(o))[0].maximum == 0


def test_errors_by_hand():
    x, o = np.array([3.0, 4.0, 0.0]), np.array([3.0, 2.0, 1.0])
    error = measured(x, o)
    assert (error.mean, error.maximum, error.relative) == (1.0, 2.0, 0.5)
    assert error.euclidean == pytest.approx((5 / 14) ** 0.5) and error.cosine == pytest.approx(17 / (5 * 14**0.5))
    assert np.isnan(measured(np.array([np.nan]), np.array([1.0])).relative)
    assert measured(np.array([-np.inf, 1]), np.array([-np.inf, 1])).maximum == 0
    grades = [graded(e) for e in (5e-7, 5e-5, 5e-4, 5e-3, 0.05, 0.5, np.nan)]
    assert grades == ["perfect", "excellent", "good", "warning", "attention", "severe", "severe"]
    assert innermost(["a", "a.b", "c", "a.b.c"]) == "c" and innermost(["", "x"]) == "x" and innermost([]) is None


# The command line


CALL = [
    "--prompt",
    "a red circle",
    "--height",
    "32",
    "--width",
    "48",
    "--num-frames",
    "5",
    "--num-inference-steps",
    "1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    pipe = tiny.wan()
    pipe.save_pretrained(folder)
    return str(folder)


def test_the_command_prints_writes_and_answers(model, tmp_path, capsys, monkeypatch):
    words = ["compare", model, "--component", "transformer", "--seed", "1", *CALL]
    report = tmp_path / "r.html"
    assert main([*words, "--debug-nans", "--debug-sharding", "--report", str(report)]) == 0
    out = capsys.readouterr().out
    assert "none parts by itself" in out and "first NaN or infinity: none" in out and "P(-, -, -)" in out
    text = report.read_text()
    headings, cells = re.findall(r"<th[ >]", text), re.findall(r"<td[ >]", text)
    assert len(headings) * 86 == len(cells) > 0
    assert (
        text.count("<circle") == 86 and "blocks.2.ffn.net.2" in text and "<script" not in text and "http" not in text
    )

    theirs = transformer_wan_flax.dispatch_attention_fn
    monkeypatch.setattr(
        transformer_wan_flax, "dispatch_attention_fn", lambda q, k, v, **more: theirs(q, k[:, 1:], v[:, 1:], **more)
    )
    assert main([*words, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)["comparisons"]
    assert [c["first"] for c in answer] == ["blocks.0.attn1"] and answer[0]["form"] == "scanned float32 mesh 1,1,1"


BAD = {
    "no such component": (["--component", "unet"], "expected a component among"),
    "no such entry": (["--component", "transformer", "--entry", "decode"], "an entry of transformer that a run calls"),
    "no such form": (["--component", "transformer", "--form", "nnx"], "expected a form of WanTransformer3DModel"),
    "a form without a component": (["--form", "nnx"], "expected --component NAME with --form"),
    "a mesh of upstream's": (
        ["--component", "vae", "--against-mesh", "1,2,1"],
        "expected no mesh of upstream's own form",
    ),
    "an attention of plain JAX": (
        ["--component", "vae", "--form", "nnx", "--attention", "online"],
        "expected no attention",
    ),
    "two meshes": (["--component", "vae", "--mesh", "1,1,1", "--mesh", "1,2,1"], "expected --mesh once"),
    "another suffix": (["--component", "vae", "--report", "r.txt"], "ends in .html"),
    "plans without a trace": (["--component", "vae", "--planned"], "expected --trace with --planned"),
    "a form of a trace": (["--trace", "--form", "nnx"], "expected --trace without --form"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(model, capsys, name):
    words, expected = BAD[name]
    capsys.readouterr()
    assert main(["compare", model, *words, *CALL]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("diffusers-tpu: ") and expected in error
