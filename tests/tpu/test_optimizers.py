"""Optimizers' steps on the chips. Oracle: torch's own of upstream's model, in the same process, same weights and inputs."""

import copy
import gc
import io
import random

import jax
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig

import denoisers
from conftest import relative, slow
from diffusers import tpu
from diffusers.tpu import idioms
from diffusers.tpu.common.config import TPUConfig
from diffusers.tpu.compile import optimizers
from diffusers.tpu.compile.chip_arrays import part_of
from diffusers.tpu.pipelines.attach import runs
from diffusers.training_utils import EMAModel


LIMIT = 1e-4


class Training:
    """A loop as upstream's scripts have it, of one model. `between`: called with it after each step's backward passes, one after another
    or the last."""

    def __init__(self, model, cls=torch.optim.AdamW, kind="flux", between=(lambda training: None,), **kwargs):
        self.model, self.kind, self.between, self.steps = model, kind, between, 0
        small = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": small, "weight_decay": 0.0}]
        self.optimizer = cls(groups, **kwargs)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.losses = []

    def loss(self):
        torch.manual_seed(self.steps)
        return (self.model(**denoisers.inputs(self.kind, 1))[0].float() - 1).square().mean()

    def run(self, steps: int) -> "Training":
        for _ in range(steps):
            for _ in range(2):
                self.steps += 1
                (loss := self.loss()).backward()
            self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.between[min(self.steps // 2, len(self.between)) - 1](self)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses += [loss.item(), self.norm.item()]
        return self


@pytest.fixture(autouse=True, scope="module")
def active():
    """As `import diffusers` has it on a TPU host."""
    idioms.on()
    yield
    idioms.off()


def pair(kind="flux", mesh=(1, 2, 2)) -> tuple:
    """Upstream's model and ours."""
    theirs = denoisers.built(kind, 4).train()
    return theirs, tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh))


def assert_alike(ours: Training, theirs: Training):
    assert ours.losses == pytest.approx(theirs.losses, rel=LIMIT)
    flat = [torch.cat([p.detach().double().flatten() for p in x.model.parameters()]) for x in (ours, theirs)]
    assert relative(*flat) < LIMIT


@pytest.mark.idiom("optimizers")
@pytest.mark.parametrize(
    "kind, mesh, cls, kwargs",
    [
        ("flux", (1, 4, 2), "AdamW", {"lr": 1e-3, "foreach": True}),
        slow("flux2", (1, 2, 4), "SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        slow("flux", (2, 2, 2), "Adam", {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.1}),
        slow("flux", (1, 1, 1), "RMSprop", {"lr": 1e-4, "momentum": 0.9}),  # by its own rate the loop goes to 1e5
        *(slow("flux", (1, 1, 1), cls, {}) for cls in ("Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam")),
    ],
)
def test_a_step_is_torchs(chips, kind, mesh, cls, kwargs):
    """Gradients of two passes, clipped, learning rates that change, groups of their own; the host sees neither gradients nor states. On
    1,4,2 the compiler would split what is kept for the way back as JAX has no name for."""
    programs, (theirs, ours) = [], pair(kind, mesh=mesh)

    def between(training):
        assert not [n for n, p in training.model.named_parameters() if p.grad is not None and not part_of(p.grad)]
        programs.append(len(optimizers._known[training.optimizer].programs) if training.steps > 2 else 0)

    of_theirs = Training(theirs, getattr(torch.optim, cls), kind, **kwargs).run(4)
    of_ours = Training(ours, getattr(torch.optim, cls), kind, (between,), **kwargs).run(4)
    states = [x for state in of_ours.optimizer.state.values() for x in state.values() if x is not None and x.ndim]
    assert all(part_of(x) for x in states) and programs[1] == programs[-1] > 0
    assert_alike(of_ours, of_theirs)


def written(training):
    next(training.model.parameters()).data.mul_(0.9)
    training.model.proj_out.weight.grad.mul_(2)


def regularized(training):
    sum(p.square().sum() for p in training.model.parameters()).backward()


def looked_at(training):
    for p in training.model.parameters():
        assert p.grad.norm() < 1 and p.isfinite().all()


def aliased(training):
    """Views of weights, those of the first step of what stands for nothing yet, follow."""
    views = vars(training).setdefault("views", [])
    views.append([p.detach() for p in training.model.parameters()])
    assert all(torch.equal(x, p) for some in views for x, p in zip(some, training.model.parameters()))


def hooked(training):
    training.hook = training.model.proj_out.weight.register_hook(lambda gradient: gradient * 0.5)


def averaged(training):
    """Of the last step's weights: on the chips, where these are."""
    if "average" not in vars(training):
        training.average = EMAModel(training.model.parameters(), decay=0.5)
    training.average.step(training.model.parameters())
    parameters = [*training.model.parameters()]
    there = [part_of(x) for x, p in zip(training.average.shadow_params, parameters) if part_of(p)]
    assert all(there) and (there or training.steps != 6 or runs(training.model) is None or "views" in vars(training))
    training.losses += [sum(x.double().square().sum().item() for x in training.average.shadow_params)]


def copied(training):
    training.average.step(training.model.parameters())
    training.average.copy_to(training.model.parameters())


def resumed(training):
    (file := io.BytesIO()).write(b"")
    torch.save([training.optimizer.state_dict(), training.model.state_dict()], file)
    states, weights = torch.load(io.BytesIO(file.getvalue()))
    training.optimizer.load_state_dict(states)
    training.model.load_state_dict(weights)


def replaced(training):
    training.optimizer.zero_grad(set_to_none=False)
    training.loss().backward()
    training.model.proj_out.bias.grad = None


def frozen(training):
    training.hook.remove()
    training.model.proj_out.requires_grad_(False)


def thawed(training):
    training.model.proj_out.requires_grad_(True)


def left(training):
    """The chips, for another model."""
    if (runner := runs(training.model)) is not None:
        runner.hbm_manager.leave(runner)


def off(training):
    if runs(training.model) is not None:
        tpu.uninstall(training.model)


def stepped_by_hooks(training):
    def tripled(*_):
        training.model.proj_out.weight.grad.mul_(3)

    training.optimizer.register_step_pre_hook(tripled)


BETWEEN = [
    (aliased, written, regularized, looked_at, aliased, averaged, averaged, copied, replaced),
    (averaged, hooked, averaged, frozen, averaged, resumed, thawed, left, averaged, stepped_by_hooks, off, written),
]


@pytest.mark.parametrize("between", BETWEEN)
def test_what_a_script_does_between_steps(chips, between):
    theirs, ours = (Training(model, between=between, lr=1e-3).run(len(between) + 1) for model in pair())
    assert_alike(ours, theirs)


def test_states_without_room_and_gradients_that_are_handed_elsewhere(chips, caplog, monkeypatch):
    """Part of them is kept on the host, and it is said; then `torch.autograd.grad`, and a step that computes gradients itself."""
    loops, _ = [], gc.collect()  # others' weights
    for model in pair():
        if (runner := runs(model)) is not None:
            runner.current()
            monkeypatch.setattr(runner.hbm_manager, "limit", 3 * runner.bytes_per_chip)
        loops.append(loop := Training(model, lr=1e-3).run(2))
        kept = [part_of(x) for state in loop.optimizer.state.values() for x in state.values()]
        asked = [p for p in model.parameters() if p.grad is not None or p in loop.optimizer.state]
        loop.losses += [g.square().sum().item() for g in torch.autograd.grad(loop.loss(), asked)]
        loop.optimizer.step(lambda: loop.loss().backward())
    assert any(kept) and not all(kept[1::3]) and "no room" in caplog.text
    assert_alike(loops[1], loops[0])


@pytest.mark.parametrize("rank, steps", [slow(4, 100), slow(0, 50)])
def test_a_long_run(chips, tmp_path, rank, steps):
    """Losses of all steps, of adapters and of all weights, also of a run that is stopped at any of them; plain upstream loads what is
    saved; after the first step nothing is compiled, and no more is held."""

    def built():
        torch.manual_seed(7)
        model = denoisers.built("flux", 4).train().requires_grad_(not rank)
        if rank:
            targets = ["to_q", "to_v", "to_out.0"]
            model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, target_modules=targets))
        return model

    def state(loop):
        return loop.model.state_dict(), loop.optimizer.state_dict(), loop.schedule.state_dict()

    theirs, ours = Training(built(), lr=1e-3), Training(tpu.install(built(), TPUConfig(mesh=(1, 4, 2))), lr=1e-3)
    theirs.run(steps)
    stop, compilations, compiled, held = random.randrange(2, steps - 1), [], [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
    )
    for step in range(steps):
        compilations.clear()
        ours.run(1)
        compiled.append(len(compilations))
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        if step + 1 == stop:
            torch.save(state(ours), tmp_path / "state.pt")
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    assert sum(theirs.losses[-20::2]) < sum(theirs.losses[:20:2])
    assert compiled[0] and not any(compiled[1:]) and max(held) < 1.01 * held[1]

    resumed = Training(tpu.install(built(), TPUConfig(mesh=(1, 4, 2))), lr=1e-3)
    for part, values in zip(("model", "optimizer", "schedule"), torch.load(tmp_path / "state.pt", weights_only=True)):
        getattr(resumed, part).load_state_dict(values)
    resumed.steps = 2 * stop
    assert resumed.run(steps - stop).losses == pytest.approx(ours.losses[2 * stop :], rel=1e-6)

    given = denoisers.inputs("flux", 1)
    if rank:
        ours.model.save_lora_adapter(tmp_path)
        torch.manual_seed(7)
        plain = denoisers.built("flux", 4)
        plain.load_lora_adapter(str(tmp_path), prefix=None, weight_name="pytorch_lora_weights.safetensors")
    else:
        ours.model.save_pretrained(tmp_path)
        plain = type(theirs.model).from_pretrained(tmp_path)
    with torch.no_grad():
        assert relative(ours.model.eval()(**given)[0], plain.eval()(**given)[0]) < LIMIT


def test_a_run_is_resumed_by_accelerate(chips, tmp_path):
    """From any step on, in a model and an optimizer of their own: the same curve."""
    losses = []
    for resume in (False, True):
        torch.manual_seed(2)
        model = tpu.install(denoisers.built("flux", 4).train(), TPUConfig(mesh=(1, 2, 2)))
        loop, accelerator = Training(model, lr=1e-3), Accelerator()
        loop.model, loop.optimizer, loop.schedule = accelerator.prepare(model, loop.optimizer, loop.schedule)
        if resume:
            accelerator.load_state(tmp_path)
            loop.steps = 4
        else:
            loop.run(2)
            accelerator.save_state(tmp_path)
            loop.losses.clear()
        losses.append(loop.run(2).losses)
        AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
