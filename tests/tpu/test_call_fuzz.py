"""Some draws of `call_fuzz`, and what stands behind it. Oracle: upstream's pipeline in the same process, and torch on the host."""

import traceback

import pytest
import torch

import call_fuzz
import tiny
from conftest import SEED
from diffusers import tpu
from diffusers.tpu import bridge


@pytest.mark.parametrize(
    "name", ["sd", "cogvideox", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wan", "flux", "hunyuan15"))]
)
def test_bad_arguments_end_as_upstreams_do(chips, name):
    """Another seed of the run (`SEED`) draws other calls."""
    one = call_fuzz.subject(name)
    for number in range(SEED * 1_000_000, SEED * 1_000_000 + 10):
        what, broken = (call_fuzz.check_setup if number % 10 == 9 else call_fuzz.check)(one, number)
        assert broken is None, f"{number}: {what}: {broken}"
    tpu.uninstall(one.ours)


@pytest.fixture
def on_chips(make_mesh):
    """Host tensors as device tensors, where those work."""
    env = bridge.environment()
    with env.override_property(mesh=make_mesh(1, 2, 1)), env:
        yield env.moved


REFUSED = (
    lambda x, y: torch.cat([x, y]),
    lambda x, y: x + y,
    lambda x, y: x.reshape(3, 5),
    lambda x, y: x @ y,
    lambda x, y: torch.nn.functional.linear(x, y),
    lambda x, y: x.view(3, -1),
    lambda x, y: torch.randn(2, 3.0, generator=torch.Generator()),
)


def test_what_torch_refuses_is_refused_in_its_words(on_chips):
    given = torch.ones(2, 4), torch.ones(3, 5)
    for operation in REFUSED:
        with bridge.environment().left(), pytest.raises(Exception) as theirs:
            operation(*given)
        with pytest.raises(type(theirs.value)) as ours:
            operation(*map(on_chips, given))
        assert str(ours.value) == str(theirs.value) and call_fuzz.inside(ours.value) is None
    with pytest.raises(TypeError, match=r"conv2d\(\) received an invalid combination of arguments - got \(int, "):
        torch.nn.functional.conv2d(3, on_chips(torch.ones(1, 1, 3, 3)))
    with pytest.raises(Exception) as failed:  # of an operator that only the chips do not take
        on_chips(torch.ones(2, 4)).view(torch.int32)
    assert not bridge.is_refused(failed.value)


def test_nothing_of_a_call_that_failed_waits(chips):
    pipe = tiny.wan()
    tpu.install(pipe)
    embeds = {"prompt_embeds": torch.randn(1, 24, 32), "negative_prompt_embeds": torch.randn(1, 24, 31)}
    with pytest.raises(RuntimeError, match="mat1 and mat2") as failed:
        pipe(**tiny.arguments("wan", prompt=None, **embeds))
    assert pipe.transformer._tpu_runner.branches.waiting == [] and not bridge.environment().active
    last = [frame for frame in traceback.extract_tb(failed.value.__traceback__) if "_wan" in frame.filename]
    assert last[-1].filename.endswith("transformer_wan.py")
    assert not pipe.transformer._tpu_runner.split
