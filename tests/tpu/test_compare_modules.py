"""Where two forms of a component part. Oracle: faults that are planted, whose place is known; intermediates by hand."""

import copy
import functools
import json
import math
import re

import jax
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import PartitionSpec
from transformers.models.umt5.modeling_umt5 import UMT5Attention

import tiny
from diffusers import tpu
from diffusers.models import attention_dispatch_flax as attention
from diffusers.models.autoencoders.vae_nnx_layers_flax import RMSNorm
from diffusers.models.transformers import transformer_wan
from diffusers.tpu.apps.cli import main
from diffusers.tpu.compare import pipelines as fidelity
from diffusers.tpu.compare import roundings
from diffusers.tpu.compare.roundings import MOST, Widening, widening
from diffusers.tpu.kernels.video.convolution import PRODUCTS, as_bfloat16_products
from diffusers.tpu.pipelines.components import modules_of
from submodules import Form, compare_component, run_form
from submodules.forms import Value
from submodules.intermediates import with_intermediates
from submodules.marks import Tag, capture
from submodules.matching import error_of, measured
from submodules.modules import compared, graded, innermost


pytestmark = pytest.mark.usefixtures("chips")


def not_finite(module, patch):
    module.blocks[1].ffn.net[2].weight.data[0, 0] = torch.nan


def norm_over(axis: int, norm: type, entry: str, **keep):
    """A norm of another axis."""
    changed = lambda self, x: (x - x.mean(axis, **keep)) / x.std(axis, **keep)  # noqa: E731
    return lambda module, patch: patch.setattr(norm, entry, changed)


def swapped_pairs(module, patch):
    """Entries half a head apart are rotated in place of neighbours, or the other way round."""
    ours = attention.normed_and_rotated
    patch.setattr(attention, "normed_and_rotated", lambda x, norm, *t, apart=False: ours(x, norm, *t, apart=not apart))


def masked_key(module, patch):
    """The last key is left out."""
    theirs = transformer_wan.dispatch_attention_fn
    without = lambda q, k, v, *args, **more: theirs(q, k[:, :-1], v[:, :-1], *args, **more)  # noqa: E731
    patch.setattr(transformer_wan, "dispatch_attention_fn", without)


def masked_word(module, patch):
    """No token attends to the first one."""
    forward = UMT5Attention.forward

    def masked(attention, hidden_states, *args, attention_mask=None, **more):
        keys = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return forward(attention, hidden_states, *args, attention_mask=attention_mask - 1e9 * (keys == 0), **more)

    patch.setattr(UMT5Attention, "forward", masked)


def transposed_kernel(module, patch):
    weight = module.transformer_blocks[1].attn1.to_q.weight
    weight.data = weight.data.T.contiguous()


# A fault is a function of a copy of the module and of pytest's monkeypatch.
WAN, HUNYUAN, COG = ("wan", "transformer"), ("hunyuan15", "transformer"), ("cogvideox", "transformer")
TEXT, VAE = ("wan", "text_encoder"), ("wan", "vae", "decode")
FAULTS = [  # one of each kind and of each component; another in the command's test
    (WAN, "scanned", masked_key, "blocks.0.attn1"),
    (WAN, "torchax", lambda module, _: module.blocks[1].attn2.to_q.bias.data.zero_(), "blocks.1.attn2.to_q"),
    (WAN, "scanned", not_finite, "blocks.1.ffn.net.2"),
    (
        HUNYUAN, "scanned", norm_over(1, torch.nn.LayerNorm, "forward", keepdim=True),
        "context_embedder.token_refiner.refiner_blocks.0.norm1",
    ),
    (COG, "scanned", transposed_kernel, "transformer_blocks.1.attn1.to_q"),
    (TEXT, "scanned", masked_word, "encoder.block.0.layer.0.SelfAttention"),
    (VAE, "nnx", norm_over(2, RMSNorm, "__call__", keepdims=True), "decoder.mid_block.resnets.0.norm1"),
]  # fmt: skip


@functools.cache
def recorded(name: str, component: str, entry: str = "forward"):
    """(the component of a tiny pipeline, a call of it, what upstream's gives, submodule by submodule)."""
    pipe = fidelity.load(tiny.make(name), torch.float32)
    calls, _ = fidelity.record(pipe, tiny.arguments(name, num_inference_steps=1, generator=None), 5)
    call = next(call for call in calls if (call.module, call.entry) == (component, entry))
    module = modules_of(pipe)[component]
    return module, call, run_form(module, Form("upstream"), call)


def comparison_of(which, kind: str, ours=None, **form):
    """Of a form of the component, or of `ours` in its place, with what upstream's gives."""
    module, call, oracle = recorded(*which)
    found = run_form(ours or module, Form(kind, **form), call)
    return compared(oracle, found, None, call, kind, "upstream")


@pytest.mark.parametrize("which, kind, plant, name", FAULTS, ids=[f"{f[0][0]}-{f[1]}-{f[3]}" for f in FAULTS])
def test_the_submodule_with_a_planted_fault_is_named_first(which, kind, plant, name, monkeypatch):
    ours = copy.deepcopy(recorded(*which)[0])
    plant(ours, monkeypatch)
    comparison = comparison_of(which, kind, ours)
    assert comparison.first == name and not comparison.ok
    assert plant is not not_finite or comparison.not_finite == name
    grade = graded(next(row for row in comparison.rows if row.name == name).error.relative)
    assert grade in ("attention", "severe", "warning")


def test_equal_weights_part_nowhere_and_values_of_a_mesh_are_put_together():
    """A VAE whose chips hold shards of the width, in chunks of frames; tokens over chips. A run before has left its program in the
    store, which has no values of submodules: every scanned block is there all the same."""
    module, call, _ = recorded(*WAN)
    tpu.install(copy.deepcopy(module), tpu.TPUConfig(mesh=(1, 1, 1)))(*call.args, **call.kwargs)
    for which, kind, mesh, name, spec in (
        (WAN, "scanned", (1, 1, 1), "blocks.1.ffn", "P(-, -, -)"),
        (WAN, "torchax", (1, 1, 1), "blocks.1.ffn", "P(-, -, -)"),
        (WAN, "scanned", (1, 4, 1), "blocks.1.ffn", "P(-, sp, -)"),
        (VAE, "nnx", (1, 2, 1), "decoder.conv_out", "a part a chip"),
    ):
        comparison = comparison_of(which, kind, mesh=mesh)
        rows = {row.name: row for row in comparison.rows}
        assert comparison.ok and max(row.error.relative for row in rows.values()) < 3e-6, comparison.first  # 1.2e-6
        assert (rows[name].chips, rows[name].spec) == (math.prod(mesh), spec)
        if which is WAN:
            assert {name.split(".")[1] for name in rows if name.startswith("blocks.")} == {"0", "1", "2"}
            assert len(comparison.rows) == len(rows) == 86
            assert {*comparison.left_out} == {f"blocks.{n}.attn1.norm_{x}" for n in range(3) for x in "qk"}


def of_bfloat16_products(precision: str):
    """A stub of the chips' float32 convolution: the products that a TPU makes of it at this precision."""

    def run(x, w):
        x, w = as_bfloat16_products(x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), PRODUCTS[precision])
        numbers = {"dimension_numbers": ("NHWC", "HWIO", "NCHW"), "preferred_element_type": np.float32}
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", **numbers)

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


def test_bfloat16_is_held_to_upstreams_own_error_in_each_submodule():
    pipe = tiny.wan()
    arguments = tiny.arguments("wan", num_inference_steps=1, generator=None)
    form = Form("scanned", torch.bfloat16)
    (comparison,) = compare_component(pipe, "transformer", form, arguments=arguments, seed=5)
    rows = {row.name: row for row in comparison.rows}
    assert comparison.ok and all(row.own is not None for row in comparison.rows)
    assert 1e-3 < rows["blocks.1.ffn.net.2"].own < 2e-2 and rows["blocks.1.ffn.net.2"].limit > 1e-3
    assert pipe.transformer.patch_embedding.weight.dtype == torch.float32  # the pipeline is left as it is


def test_what_cannot_be_run_is_refused_with_the_way_out():
    module, call, _ = recorded(*WAN)
    with pytest.raises(ValueError, match="upstream, torchax, scanned"):
        run_form(module, Form("nnx"), call)
    with pytest.raises(ValueError, match="expected a form among"):
        Form("jax")

    class Decides(torch.nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    with pytest.raises(NotImplementedError, match="compare --trace"):
        run_form(Decides(), Form("torchax"), fidelity.Call("m", "forward", (torch.ones(2),), {}))


def test_intermediates_by_hand(chips):
    """Marks in a scan, a compiled part, a part of each chip, a branch and an open loop; the program's own outputs with them."""
    mesh, halves = jax.sharding.Mesh(np.array(chips[:2]), ("sp",)), PartitionSpec("sp")

    def marked(x, name, number, result):
        capture(x, Tag(name, True, 0, number))
        return result

    def program(weights, x):
        x, befores = lax.scan(lambda c, w: (marked(c * w, "block", 0, c * w + 1), c), x, weights)
        x = jax.jit(lambda x: marked(x, "jit", 1, x * 2))(x)
        x = jax.shard_map(lambda x: marked(x, "chip", 2, x + 1), mesh=mesh, in_specs=halves, out_specs=halves)(x)
        x = lax.cond(x[0] > 0, lambda x: marked(x, "branch", 3, x), lambda x: x, x)
        return lax.while_loop(lambda x: x[0] < 100, lambda x: marked(x, "loop", 4, x * 3), x), befores

    weights, x = np.float32([2, 3]), np.float32([1, 5])
    jaxpr, places = jax.jit(program).trace(weights, x).jaxpr, []

    def run(*arguments):
        found = with_intermediates(jaxpr, arguments)
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


def test_layouts_are_told_by_shapes():
    for shape, change in LAYOUTS.values():
        o = np.random.default_rng(1).normal(size=shape)
        assert error_of([Value(change(o))], Value(o))[0].maximum == 0
        assert error_of([Value(change(o) + 0.5)], Value(o))[0].mean == pytest.approx(0.5)
        assert error_of([Value(o[..., :-1])], Value(o)) is None


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


CALL = "--prompt red --height 32 --width 48 --num-frames 5 --num-inference-steps 1".split()


def test_the_command_prints_writes_and_answers(wan_folder, tmp_path, capsys, monkeypatch):
    words = ["compare", wan_folder, "--component", "transformer", "--seed", "1", *CALL]
    report = tmp_path / "r.html"
    assert main([*words, "--debug-nans", "--debug-sharding", "--report", str(report)]) == 0
    out = capsys.readouterr().out
    assert "none parts by itself" in out and "first NaN or infinity: none" in out and "P(-, -, -)" in out
    text = report.read_text()
    headings, cells = re.findall(r"<th[ >]", text), re.findall(r"<td[ >]", text)
    assert len(headings) * 86 == len(cells) > 0
    assert text.count("<circle") == 86 and "blocks.2.ffn.net.2" in text
    assert "<script" not in text and "http" not in text

    swapped_pairs(None, monkeypatch)
    assert main([*words, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)["comparisons"]
    assert [c["first"] for c in answer] == ["blocks.0.attn1"] and answer[0]["form"] == "scanned float32 mesh 1,1,1"


BAD = {
    "--component unet": "expected a component among",
    "--component transformer --entry decode": "an entry of transformer that a run calls",
    "--component transformer --form nnx": "expected a form of WanTransformer3DModel",
    "--form nnx": "expected --component NAME with --form",
    "--depth 1": "expected --component NAME with --depth",
    "--component vae --against-mesh 1,2,1": "expected no mesh of upstream's own form",
    "--component vae --form nnx --attention online": "expected no attention",
    "--component vae --mesh 1,1,1 --mesh 1,2,1": "expected --mesh once",
    "--component vae --report r.txt": "ends in .html",
    "--component vae --planned": "expected --trace with --planned",
    "--trace --form nnx": "expected --trace without --form",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_and_status_2(wan_folder, capsys, words):
    assert main(["compare", wan_folder, *words.split(), *CALL]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("diffusers-tpu: ") and BAD[words] in error
