"""Bad and odd arguments of five pipelines, of their models and of what sets the TPU path up: ours against upstream.

Calls are of a whole pipeline or of one method of one of its models, with one or two arguments changed.
Where upstream answers, ours answers with its numbers (1e-4). Where upstream raises, ours raises an error of the same class or
one of ours that is a ValueError, TypeError or NotImplementedError. Of what a user is shown of an error (it, its causes and
contexts), nothing was raised inside of jax, jaxlib or torchax, and no class is theirs. After each error the pipeline answers the
next good call as before. What has no counterpart upstream (`TPUConfig`, `install`, `report`) must raise such an error.
Known to be otherwise: `KNOWN`. Oracle of a single operation: torch on the host.
"""

import copy
import inspect
import re
import traceback
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import call_faults
import tiny
from conftest import SEED, slow
from diffusers import tpu
from diffusers.tpu import bridge
from diffusers.tpu.compare.pipelines import Call, record, run_pipeline, values_of


LIMIT, OWN_SEED = 1e-4, 3
NOT_OF_USERS = ("jax", "jaxlib", "torchax")
CLEAR = (ValueError, TypeError, NotImplementedError)
KNOWN = (
    # HunyuanVideo-1.5's VAE fails upstream for more than one video, by the mask of its attention; ours does not.
    r"^does not raise upstream's RuntimeError\(.output with shape \[(\d+), 1, (\d+), \2\] doesn't match .* \[\1, \1, \2, \2\]",
    # torch takes a mask that has more keys than there are, and gives numbers for them.
    r"^raises ValueError\(.expected an attention mask that broadcasts to .* where upstream does not$",
    # No program sees an index beyond the end, of a table or a mask: who looked would wait for the chips.
    r"^does not raise upstream's IndexError\(.index (out of range in self|\d+ is out of bounds for dimension)",
    # Of a layer and what it is given the wider dtype counts, as scripts under autocast expect; torch outside of it has one dtype. What is
    # wrong beside that is found behind it.
    r"^(does not raise|raises .* for) upstream's RuntimeError\(.(mat1 and mat2 must have the same dtype, but got (Double|Float|Half|BFloat16)|expected m1 and m2 to have the same dtype, but got: (double|float|c10)|Input type \((double|float|c10::Half)\) and bias type)",
    # A first-block cache on Kandinsky 5 ends upstream in the first block, by the name of an argument; here before it.
    r"^raises ValueError\(.No cache context is set.* for upstream's KeyError\(.hidden_states",
    # A tensor on torch's meta device has no values; upstream's answer to it has none either.
    r"^raises TypeError\(.can't convert meta device type tensor to numpy.* where upstream does not$",
)  # fmt: skip


@dataclass
class Subject:
    """One pipeline twice, without and with the TPU path; what a good call of it gives, and its models' calls in there."""

    name: str
    theirs: object
    ours: object
    given: dict
    calls: list[Call]
    expected: list[np.ndarray]


def subject(name: str) -> Subject:
    theirs = tiny.make(name)
    given = tiny.arguments(name, num_inference_steps=2, generator=None)
    ours = copy.deepcopy(theirs)
    calls, expected = record(theirs, given, OWN_SEED)
    return Subject(name, theirs, tpu.install(ours), given, calls, expected)


def outcome(run) -> tuple[list[np.ndarray] | None, Exception | None]:
    """What it gives, as arrays, or the error that it ends in."""
    torch.manual_seed(OWN_SEED)
    try:
        return run(), None
    except Exception as error:
        return None, error


def inside(error: BaseException) -> str | None:
    """Where in jax, jaxlib or torchax an error was raised, or one that its traceback shows with it; None: none was."""
    while error is not None:
        file = traceback.extract_tb(error.__traceback__)[-1].filename
        owner = type(error).__module__.partition(".")[0]
        if owner in NOT_OF_USERS or any(f"/{name}/" in file for name in NOT_OF_USERS):
            return f"{type(error).__name__} from {file}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def is_ours(error: BaseException) -> bool:
    return "/diffusers/tpu/" in traceback.extract_tb(error.__traceback__)[-1].filename and isinstance(error, CLEAR)


def differ(ours: list, theirs: list) -> str | None:
    """How these results are not the same; None: they are."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return f"shapes {[x.shape for x in ours]} for {[x.shape for x in theirs]}"
    for x, y in zip(ours, theirs):
        x, y = (np.asarray(values, np.float64) for values in (x, y))
        same = np.isfinite(y)
        if not np.array_equal(np.isfinite(x), same):
            return f"{np.isfinite(x).sum()} finite numbers for {same.sum()}"
        error = np.linalg.norm(x[same] - y[same]) / (np.linalg.norm(y[same]) or 1.0)
        if error > LIMIT:
            return f"error {error:.1e}"
    return None


def wrong(ours, theirs) -> str | None:
    """How an outcome of ours breaks the contract with upstream's; None: it does not, or is known."""
    broken = _wrong(ours, theirs)
    return None if broken is None or any(re.search(pattern, broken) for pattern in KNOWN) else broken


def _wrong(ours, theirs) -> str | None:
    (values, error), (expected, upstream) = ours, theirs
    if error is not None and (where := inside(error)):
        return f"raises inside: {where}: {error}"
    if error is not None and upstream is None:
        return f"raises {error!r} where upstream does not"
    if error is None and upstream is not None:
        return f"does not raise upstream's {upstream!r}"
    if error is None:
        return differ(values, expected)
    alike = type(error) is type(upstream) or is_ours(error)
    return None if alike else f"raises {error!r} for upstream's {upstream!r}"


def whole(pipe, given: dict):
    """A call of the pipeline; its own generator unless one is given."""
    return values_of(pipe(**given)) if "generator" in given else run_pipeline(pipe, given, OWN_SEED)


def alone(pipe, call: Call):
    """A call of one model's method."""
    own = call.copied()
    with torch.no_grad():
        output = getattr(pipe.components[call.module], call.entry)(*own.args, **own.kwargs)
    return [leaf.detach().float().numpy() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def draws(one: Subject, number: int) -> np.random.Generator:
    """Others for each pipeline."""
    return np.random.default_rng([number, *one.name.encode()])


def good_call(one: Subject) -> str | None:
    """How a good call after an error is not as before; None: it is."""
    again, error = outcome(lambda: run_pipeline(one.ours, one.given, OWN_SEED))
    broken = repr(error) if error else differ(again, one.expected)
    return broken and f"afterwards: {broken}"


def check(one: Subject, number: int) -> tuple[str, str | None]:
    """What call of this number is, and how it breaks the contract."""
    rng = draws(one, number)
    if rng.random() < 0.4:
        call = one.calls[rng.integers(len(one.calls))]
        method = getattr(one.theirs.components[call.module], call.entry)
        what, change = call_faults.of_a_model(rng, call, inspect.signature(method))
        what, run = f"{call.module}.{call.entry} {what}", alone
    else:
        (what, change), run = call_faults.of_a_pipeline(rng, one), whole
    theirs, ours = (outcome(lambda: run(pipe, change())) for pipe in (one.theirs, one.ours))
    broken = wrong(ours, theirs)
    return what, good_call(one) if broken is None and ours[1] is not None else broken


def check_setup(one: Subject, number: int) -> tuple[str, str | None]:
    """The same of a call that sets the TPU path up, whose arguments are wrong."""
    what, run = call_faults.of_the_setup(draws(one, number), one.ours)
    _, error = outcome(run)
    if error is None:
        return what, "does not raise"
    if inside(error) or not isinstance(error, (*CLEAR, RuntimeError)):
        return what, f"raises {error!r}"
    return what, good_call(one)


@pytest.mark.parametrize("name", ["sd", *map(slow, ("cogvideox", "wan", "flux", "hunyuan15"))])
def test_bad_arguments_end_as_upstreams_do(chips, name):
    """Another seed of the run (`SEED`) draws other calls."""
    one = subject(name)
    for number in range(SEED * 1_000_000, SEED * 1_000_000 + 10):
        what, broken = (check_setup if number % 10 == 9 else check)(one, number)
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
        assert str(ours.value) == str(theirs.value) and inside(ours.value) is None
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
