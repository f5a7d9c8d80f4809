"""Some draws of `call_fuzz`, and what stands behind it. Oracle: upstream's pipeline in the same process, and torch on the host."""

import traceback

import pytest
import torch

import call_fuzz
import tiny
from diffusers import tpu
from diffusers.tpu import bridge


@pytest.mark.parametrize("name", ["sd", "cogvideox"])
def test_bad_arguments_end_as_upstreams_do(chips, name):
    with call_fuzz.simulated():
        one = call_fuzz.subject(name)
        for number in range(10):
            check = call_fuzz.check_setup if number % 10 == 9 else call_fuzz.check
            what, broken = check(one, number)
            assert broken is None, f"{number}: {what}: {broken}"
    tpu.uninstall(one.ours)


@pytest.fixture
def on_chips(make_mesh):
    """Host tensors as device tensors, where those work."""
    env = bridge.environment()
    with env.override_property(mesh=make_mesh(1, 2, 1)), env:
        yield env.moved


REFUSED = {
    "cat": lambda x, y: torch.cat([x, y]),
    "sum of two": lambda x, y: x + y,
    "reshape": lambda x, y: x.reshape(3, 5),
    "matmul": lambda x, y: x @ y,
    "linear": lambda x, y: torch.nn.functional.linear(x, y),
    "view": lambda x, y: x.view(3, -1),
    "draw": lambda x, y: torch.randn(2, 3.0, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(on_chips, name):
    given = torch.ones(2, 4), torch.ones(3, 5)
    with bridge.environment().left(), pytest.raises(Exception) as theirs:
        REFUSED[name](*given)
    with pytest.raises(type(theirs.value)) as ours:
        REFUSED[name](*map(on_chips, given))
    assert str(ours.value) == str(theirs.value)
    assert call_fuzz.inside(ours.value) is None


def test_a_number_in_place_of_a_tensor_is_refused_by_torch(on_chips):
    with pytest.raises(TypeError, match=r"conv2d\(\) received an invalid combination of arguments - got \(int, "):
        torch.nn.functional.conv2d(3, on_chips(torch.ones(1, 1, 3, 3)))


def test_an_operator_that_only_the_chips_do_not_take_is_not_torchs_refusal(on_chips):
    with pytest.raises(Exception) as failed:
        on_chips(torch.ones(2, 4)).view(torch.int32)
    assert not bridge.is_refused(failed.value)


def test_nothing_of_a_call_that_failed_waits(chips):
    pipe = tiny.wan()
    pipe.set_progress_bar_config(disable=True)
    tpu.install(pipe)
    embeds = {
        "prompt": None,
        "prompt_embeds": torch.randn(1, 24, 32),
        "negative_prompt_embeds": torch.randn(1, 24, 31),
    }
    with pytest.raises(RuntimeError, match="mat1 and mat2") as failed:
        pipe(**{**tiny.arguments("wan"), **embeds})
    assert pipe.transformer._tpu_runner.branches.waiting == [] and not bridge.environment().active
    last = [frame for frame in traceback.extract_tb(failed.value.__traceback__) if "_wan" in frame.filename]
    assert last[-1].filename.endswith("transformer_wan.py")
    assert not pipe.transformer._tpu_runner.parts
