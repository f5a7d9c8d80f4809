"""Gradients of compiled models. Oracle: torch's own of upstream's model, in the same process, same weights and inputs."""

import copy
import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import denoisers
import tiny
from conftest import relative, run_python, slow
from diffusers import AutoencoderKL, tpu
from diffusers.tpu.common.config import TPUConfig
from diffusers.tpu.compile.gradients import DifferentiatedCall
from diffusers.tpu.pipelines.attach import runs


LIMIT = 1e-4  # of all gradients of a kind together: a single one may be a difference of almost equal numbers


def asking(given: dict) -> dict:
    """A copy of the arguments, of which hidden states and samples ask for gradients, as they do in training."""
    return {
        name: x.clone().requires_grad_()
        if name.endswith(("hidden_states", "sample", "z"))
        else tree_map_only(torch.Tensor, torch.clone, x)
        for name, x in given.items()
    }


def gradients(model, given: dict, call=None) -> tuple[dict, dict]:
    """Of a fixed sum of the outputs' squares: by the arguments' numbers, and by parameters' names."""
    given = asking(given)
    model.zero_grad()
    output = (call or model)(**given)
    loss = sum((x.float() ** 2).mean() for x in tree_leaves(tuple(output)) if isinstance(x, torch.Tensor))
    loss.backward()
    tensors = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
    return (
        {n: t.grad for n, t in enumerate(tensors) if t.grad is not None},
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    )


def assert_alike(found: tuple[dict, dict], expected: tuple[dict, dict]):
    for ours, theirs in zip(found, expected):
        assert {*ours} >= {*theirs} and theirs
        # Of what the output does not depend on: the last layer of a stack alone has zeros, elsewhere there is none.
        assert not any(ours[name].any() or "blocks.0." in name for name in {*ours} - {*theirs})
        assert all(ours[name].dtype == theirs[name].dtype for name in theirs)
        assert apart(ours, theirs) < LIMIT


def apart(some: dict, others: dict) -> float:
    """How far gradients are from others, all together."""
    return relative(*(torch.cat([x[name].double().flatten() for name in others]) for x in (some, others)))


def assert_upstreams(theirs, given: dict, mesh, again: bool, kernel: str, call=None):
    """`again`: with upstream's gradient checkpointing, and no room to keep what layers give. `kernel`: of attention, interpreted."""
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh, attention=kernel))
    with pytest.MonkeyPatch.context() as patch:
        if again:
            theirs = copy.deepcopy(theirs)
            ours.enable_gradient_checkpointing(), theirs.enable_gradient_checkpointing()
            patch.setattr(DifferentiatedCall, "_room", lambda self: 0.0)
        found, expected = (gradients(m, given, call and functools.partial(call, m)) for m in (ours, theirs))
    assert_alike(found, expected)
    assert not tpu.report(ours)["eager"]


def assert_as_exact_in_bfloat16(theirs, draws: list[dict], mesh, call=None):
    """Off float32's by what upstream's are off, on average: of one draw either may be twice the other."""
    narrow = copy.deepcopy(theirs).bfloat16()
    models, off = (theirs, tpu.install(copy.deepcopy(narrow), TPUConfig(mesh=mesh)), narrow), []
    for given in draws:
        given = tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, given)
        exact = tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, given)
        found = [gradients(m, exact if m is theirs else given, call and functools.partial(call, m)) for m in models]
        off.append([[apart(own, wide) for own, wide in zip(some, found[0])] for some in found[1:]])
    ours, upstreams = torch.tensor(off).mean(0)
    assert (ours > 1e-4).all() and (ours < 1.3 * upstreams).all(), (ours, upstreams)


@pytest.mark.parametrize(
    "kind, mesh, batch, heads, training, again, kernel",
    [
        slow("sd3.5", (1, 8, 1), 1, 3, True, True, "kernel"),
        slow("qwen", (1, 4, 1), 1, 3, False, False, "auto"),
        ("cogvideox 1.5 image", (1, 4, 2), 2, 6, True, True, "auto"),
        ("hunyuan", (2, 2, 2), 2, 2, True, True, "kernel"),
        slow("flux2", (1, 2, 4), 1, 4, True, True, "kernel"),
        slow("flux joined", (2, 2, 2), 2, 4, True, True, "kernel"),
    ],
)
def test_gradients_of_denoisers(chips, kind, mesh, batch, heads, training, again, kernel):
    model = denoisers.built(kind, heads).train(training)
    assert_upstreams(model, denoisers.inputs(kind, batch), mesh, again, kernel)


def decoded_again(model, sample):
    """As scripts train a VAE: of what it encoded, what it decodes."""
    return model.decode(model.encode(sample).latent_dist.mode(), return_dict=False)


# Kind -> a tiny model, the shape of a picture or video.
VAES = {
    "image vae": ("kl", (2, 3, 24, 40)), "wan vae": ("wan_vae", (2, 3, 5, 24, 40)), "ltx vae": ("ltx.vae", (2, 3, 9, 32, 96)),
    "cogvideox vae": ("cogvideox_15.vae", (2, 3, 5, 24, 40)), "hunyuan 1.5 vae": ("hunyuan15.vae", (1, 3, 5, 32, 48)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize("kind", ["wan", "flux", "sd3.5", "sdxl", "cogvideox 1.5", "hunyuan 1.5", "ltx", *VAES])
def test_gradients_of_every_family(chips, kind, mesh):
    """With checkpointing and without; on one chip attention by its kernel."""
    kernel, call = "kernel" if mesh == (1, 1, 1) else "auto", None
    if kind in VAES:
        name, shape = VAES[kind]
        model, draws, call = tiny.part(name), [{"sample": torch.randn(shape)} for _ in range(8)], decoded_again
    else:
        model, draws = denoisers.built(kind, 4), [denoisers.inputs(kind, 2) for _ in range(8)]
    for again in (False, True)[: 1 + model._supports_gradient_checkpointing]:
        assert_upstreams(model.train(), draws[0], mesh, again, kernel, call)
    if mesh == (1, 8, 1):
        assert_as_exact_in_bfloat16(model, draws, mesh, call)


def test_weights_that_no_output_depends_on_have_no_gradient(chips):
    """A decoder's: an optimizer with weight decay would shrink an encoder's if they had zeros. Those of both, one behind the other.
    Where a loss is of the first of two outputs, those of the second alone have none either."""
    theirs = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=(1, 1, 1)))
    given = {"z": torch.randn(2, 4, 5, 3), "return_dict": False}
    found, expected = gradients(ours, given, ours.decode), gradients(theirs, given, theirs.decode)
    assert_alike(found, expected)
    assert {*found[1]} == {*expected[1]} and not any("encoder" in name for name in found[1])
    given = {"sample": torch.randn(2, 3, 10, 6)}
    assert_alike(*(gradients(model, given, functools.partial(decoded_again, model)) for model in (ours, theirs)))
    theirs, given = denoisers.built("ltx2", 4), denoisers.inputs("ltx2", 1)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=(1, 1, 1)))
    for model in (ours.train(), ours.eval()):
        found, expected = (gradients(m, given, lambda m=m, **given: m(**given)[:1]) for m in (model, theirs))
        assert_alike(found, expected)
        more = {name for name in {*found[1]} - {*expected[1]} if "transformer_blocks" not in name}
        assert not more and "audio_scale_shift_table" not in found[1]


def test_evaluation_mode_shares_the_program_of_calls_without_gradients(chips):
    """Of a model that turns pairs as complex numbers."""
    theirs, given = denoisers.built("qwen", 4), denoisers.inputs("qwen", 1)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=(1, 2, 1)))
    with torch.no_grad():
        ours(**given)
    (program,) = runs(ours).programs.values()
    ours(**given)[0].sum()
    assert [*runs(ours).programs.values()] == [program] and program.calls == 2
    x = given["hidden_states"].requires_grad_()
    (gradient,) = torch.autograd.grad(ours(**given)[0].square().sum(), x)
    (expected,) = torch.autograd.grad(theirs(**given)[0].square().sum(), x)
    assert relative(gradient, expected) < LIMIT
    loss = ours(**given)[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = ours(**given)[0].sum()
    ours.scale_by = 2  # its Python is another now
    with pytest.raises(RuntimeError, match="has changed since"):
        loss.backward()


@pytest.mark.slow
def test_the_script_teaches_the_shipped_model_a_shape(root, tmp_path):
    """TRAINING.md's lines; the scorer names it."""
    models, clips = root / "examples/tpu/models", tmp_path / "clips"
    run_python(models / "draw_clips.py", "diamond", clips, "--count", 48)
    where = ["--model", models / "wan-shapes", "--data", clips, "--output", tmp_path / "out"]
    how = ["--dtype", "float32", "--batch-size", 8, "--learning-rate", 2e-3, "--steps", 300]
    shown = ["--validation-prompt", "a green diamond moving left"]
    shown += ["--validation-steps", 16, "--validation-guidance", 2]
    run_python(root / "examples/tpu/train_lora.py", *where, *how, *shown, DIFFUSERS_TPU="cpu")
    named = run_python(models / "score_wan_shapes.py", tmp_path / "out/validation.mp4").stdout
    assert "green diamond left" in named
