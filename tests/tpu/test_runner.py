"""Oracle: the module in torch. What is compiled, how often, and that a changed module is never answered from before."""

import contextlib
import copy

import jax
import pytest
import torch
from torch.autograd import forward_ad

from conftest import relative
from diffusers.tpu import bridge
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile import programs
from diffusers.tpu.compile.host import HostModel
from diffusers.tpu.compile.state.state import State
from diffusers.tpu.weights.hbm import hbm_manager_of
from test_changes import resident


class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.gain = 1.0

    def forward(self, hidden_states, timestep, table=None, return_dict=True):
        out = self.linear(hidden_states) * timestep[:, None] * self.gain
        out = out if table is None else out + table
        return {"sample": out} if return_dict else (out,)

    def encode(self, x):
        return self.forward(x, torch.ones(x.shape[0]))["sample"]


def test_one_program_per_shape_and_static_argument(attach):
    """A method that calls another is one program too."""
    module = Denoiser()
    x, t = torch.randn(2, 8), torch.rand(2)
    theirs, encoded = module(x, t)["sample"], module.encode(x)
    runner = attach(module, 1, 2, 1, plan=ModelPlan(entries=("forward", "encode")))
    assert relative(module(x, t)["sample"], theirs) < 1e-6
    module(torch.randn(2, 8), timestep=torch.rand(2))  # by keyword: the same values in another structure
    module(x, torch.rand(2))
    assert runner.compilations == 2
    assert isinstance(module(x, t, return_dict=False), tuple) and runner.compilations == 3
    module(torch.randn(3, 8), torch.rand(3))
    assert runner.compilations == 4
    assert relative(module.encode(x), encoded) < 1e-6 and runner.compilations == 5


@pytest.mark.parametrize("room", [None, 1.0])
def test_a_call_looks_at_its_module_once(attach, monkeypatch, room):
    looks, look = [], State.same
    monkeypatch.setattr(State, "same", lambda self: looks.append(self) or look(self))
    module = Denoiser()
    runner = attach(module, 1, 1, 1, hbm_gib=room)
    runner.hbm_manager = hbm_manager_of(runner.mesh, runner.config)
    for expected in (None, 1, 1):
        looks.clear()
        module(torch.randn(2, 8), torch.rand(2))
        assert expected in (None, len(looks))


def test_programs_that_were_not_used_for_long_go(attach, monkeypatch):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(len(runner.traced)))
    module = Denoiser()
    theirs, runner = copy.deepcopy(module), attach(module, 1, 2, 1, programs=3)

    def call(size: int):
        x, t = torch.randn(size, 8), torch.rand(size)
        assert relative(module(x, t)["sample"], theirs(x, t)["sample"]) < 1e-6

    for size in (1, 2, 3, 1, 4, 1, 3, 4):
        call(size)
    assert (runner.compilations, runner.evicted, len(runner.traced)) == (4, 1, 3) and len(cleared) == 1
    call(2)
    assert (runner.compilations, runner.evicted) == (5, 2)
    for gain in (2.0, 3.0, 4.0, 5.0, 2.0):  # states go too, and one that comes back is none of those that were kept
        module.gain = theirs.gain = gain
        call(2)
    assert (runner.compilations, len(runner.traced), len(runner.state._ids)) == (10, 3, 3)


def test_programs_whose_code_has_no_room_go(attach, monkeypatch):
    monkeypatch.setattr(programs.Program, "code_bytes", 600)
    runner = attach(Denoiser(), 1, 1, 1, program_gib=1300 / 2**30)
    for size in (1, 2, 3, 4):
        runner.module(torch.randn(size, 8), torch.rand(size))
    assert (len(runner.traced), runner.evicted) == (2, 2)
    runner.traced.most_bytes = 0
    runner.module(torch.randn(5, 8), torch.rand(5))  # what runs stays
    assert len(runner.traced) == 1


class Rounded(torch.nn.Module):
    """Sums rounded to bfloat16 and widened again, as Kandinsky 5's rotated queries are."""

    def forward(self, x, table):
        return (x * table).sum(-1).to(torch.bfloat16).float()


def test_a_sum_that_upstream_rounds_is_rounded(attach):
    module, given = Rounded(), (torch.randn(4099, 16, 2), torch.randn(4099, 16, 2))
    theirs = module(*given)
    attach(module, 1, 1, 1)
    assert relative(module(*given), theirs) < 1e-5  # 1.4e-3 where it is not; a last bit before it can move it


def test_a_size_that_is_compiled_for_later_is_said_with_the_seconds_of_the_one_before(attach, monkeypatch):
    sentences: dict[str, str] = {}
    monkeypatch.setattr(programs.notices, "warn_once", sentences.setdefault)
    module = Denoiser()
    runner = attach(module, 1, 2, 1)
    module(torch.randn(2, 8), torch.rand(2))
    (program,) = runner.programs.values()
    program.compile_seconds = 31.4
    for batch in (2, 3, 2, 3):
        module(torch.randn(batch, 8), torch.rand(batch))
    (sentence,) = sentences.values()
    assert "Denoiser.forward is compiled for [3, 8], [3], after [2, 8], [2]: some 31 s" in sentence
    [*runner.programs.values()][-1].compile_seconds = programs.WORTH_A_WORD / 2
    module(torch.randn(4, 8), torch.rand(4))
    assert len(sentences) == 1 and runner.compilations == 3


def test_another_generator_is_another_draw_but_no_other_program(attach):
    class Decoder(torch.nn.Module):
        def forward(self, x, generator, drawing=False):
            return x * 2 + torch.randn(x.shape, generator=generator) if drawing else x * 2

    module, x = Decoder(), torch.randn(2, 8)
    runner = attach(module, 1, 2, 1)
    for drawing in (False, True):
        for seed in (1, 2):
            theirs = Decoder.forward(module, x, torch.Generator().manual_seed(seed), drawing)
            assert relative(module(x, torch.Generator().manual_seed(seed), drawing), theirs) < 1e-6
    assert runner.compilations == 1 and runner.eager == ["it draws random numbers"]


class Noting(torch.nn.Module):
    """Writes into what it is given, and then does what only the host can, if it is `sparse`."""

    def __init__(self, sparse: bool):
        super().__init__()
        self.sparse = sparse

    def forward(self, x, kept):
        x.mul_(2)
        kept.append(x.sum())
        kept[0] = "seen"
        return x.to_sparse().to_dense() if self.sparse else x + 1


class Around(torch.nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.inner = Noting(sparse)

    def forward(self, x):
        y, kept = x * (1 if float(x.sum()) < 1e9 else 2), ["new"]  # its own lines run one by one
        answer = self.inner(y, kept) + y + kept[-1] * len(kept)
        return answer if kept[0] == "seen" else answer * 3


@pytest.mark.parametrize("where", ["chips", "falls back", "host"])
def test_what_a_part_writes_into_its_arguments_is_there_once(attach, where):
    """The first call that falls back has run on the chips until it failed."""
    module, x = Around(where == "falls back"), torch.randn(2, 8)
    theirs = module(x)
    runner = attach(module, 1, 2, 1)
    if where == "host":
        HostModel(module.inner, ("forward",), runner.mesh).attach()
    for _ in range(3):
        assert relative(module(x), theirs) < 1e-6


@pytest.mark.parametrize("device", [False, True])
def test_a_model_on_the_host_writes_into_what_it_is_given(make_mesh, device):
    module, kept = Noting(False), ["new"]
    HostModel(module, ("forward",), make_mesh(1, 2, 1)).attach()
    with contextlib.ExitStack() as stack:
        x = torch.ones(2, 8)
        if device:
            x = stack.enter_context(bridge.environment()).moved(x)
        module(x, kept)
        assert float(x.sum()) == 32 and kept[0] == "seen" and float(kept[1]) == 32


def test_modules_that_are_named_as_stacks_are_none(attach):
    module, x = torch.nn.Sequential(), torch.randn(2, 8)
    for name in ("3*3", "[0]"):
        module.add_module(name, torch.nn.Linear(8, 8))
    theirs = module(x)
    attach(module, 1, 2, 1)
    assert relative(module(x), theirs) < 1e-6


def dual(module, x):
    with forward_ad.dual_level():
        return module(forward_ad.make_dual(x, x))


OTHERS = {
    "second": lambda module, x: torch.autograd.grad(module(x.requires_grad_()).sum(), x, create_graph=True),
    "forward": dual,
    "torch.func": lambda module, x: torch.func.jvp(module, (x,), (x,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_derivatives_than_the_first_are_refused(attach, name):
    attach(module := torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), 1, 2, 1)
    with pytest.raises(NotImplementedError, match="expected first derivatives by backward"):
        OTHERS[name](module, torch.randn(2, 8))


@pytest.mark.parametrize("training", [True, False])
def test_hooks_on_gradients_inside_of_a_model_run(attach, training):
    theirs, x, found = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.randn(2, 8), []
    ours = copy.deepcopy(theirs)
    attach(ours, 1, 2, 1)
    for module in (ours.train(training), theirs.train(training)):
        module[1].register_full_backward_hook(lambda module, given, gradients: (given[0] * 0.5,))
        module(x).sum().backward()
        found.append(module[0].weight.grad)
    assert relative(*found) < 1e-5


PAIRED = ModelPlan(batched=("hidden_states", "timestep"))


def test_a_branch_alone_and_branches_that_share_nothing_run_alone(attach):
    module = Denoiser()
    x, t, tables = torch.randn(1, 8), torch.rand(1), torch.randn(2, 8)
    theirs = [module(x, t, table, return_dict=False)[0] for table in tables]
    runner = attach(module, 2, 1, 1, plan=PAIRED)
    with resident(runner) as env:
        x, t, a, b = map(env.moved, (x, t, *tables))
        alone = module(x, t, a, return_dict=False)[0]
        assert relative(bridge.from_numpy((alone * 1.0).jax()), theirs[0]) < 1e-6
        pair = [module(x, t, table, return_dict=False)[0] for table in (a, b)]  # another table: not one call
        for ours, oracle in zip(pair, theirs):
            assert relative(bridge.from_numpy(ours.jax()), oracle) < 1e-6
    assert [(p.branches, p.calls) for p in runner.programs.values()] == [(1, 3)]  # one program for all


def test_outputs_without_a_batch_are_refused_where_branches_pair(attach):
    class Odd(Denoiser):
        def forward(self, hidden_states, timestep):
            return self.linear(hidden_states).sum()

    module = Odd()
    runner = attach(module, 2, 1, 1, plan=PAIRED)
    with resident(runner) as env, pytest.raises(ValueError, match="mesh with dp 1"):
        module(*map(env.moved, (torch.randn(1, 8), torch.rand(1))))
