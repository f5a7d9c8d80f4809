"""Oracle: upstream's scheduler, stepped on the host with the same tensors; counted traces."""

import pytest
import torch

from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)


SHAPE = (1, 3, 5)


@pytest.fixture
def inside(chips):
    """Where device tensors work, as in a pipeline's call; a function that moves tensors there."""
    from diffusers.tpu import bridge

    env = bridge.environment()
    with bridge.quiet_integers(), bridge.decomposing(), env:
        yield env.moved


def made(name):
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return {
        "unipc": lambda: UniPCMultistepScheduler(**flow),
        "unipc 3": lambda: UniPCMultistepScheduler(solver_order=3),
        "flow": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
        "dpm": lambda: DPMSolverMultistepScheduler(algorithm_type="dpmsolver++"),
        "ddim": DDIMScheduler,
        "cogvideox": CogVideoXDDIMScheduler,
        "euler": EulerDiscreteScheduler,
        "ancestral": EulerAncestralDiscreteScheduler,
    }[name]()


def stepped(scheduler, there, steps=7, seed=0, change=None, tables="cpu"):
    """The samples of one schedule from fresh noise; `there` moves them. `tables`: the device of the schedule."""
    generator = torch.Generator().manual_seed(seed)
    scheduler.set_timesteps(steps, device=tables)
    sample, found = torch.randn(SHAPE, generator=generator), []
    outputs = [torch.randn(SHAPE, generator=generator) for _ in scheduler.timesteps]
    noise = {"generator": generator} if isinstance(scheduler, EulerAncestralDiscreteScheduler) else {}
    sample = there(sample)
    for number, (t, output) in enumerate(zip(scheduler.timesteps, outputs)):
        if change is not None and number == 3:
            change(scheduler)
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(sample, t)
        sample = scheduler.step(there(output), t, sample, return_dict=False, **noise)[0]
        found.append(sample)
    return found


def on_host(samples):
    from diffusers.tpu.pipelines import glue

    return torch.stack([glue.on_host(sample).float() for sample in samples])


@pytest.mark.parametrize(
    "name, tables",
    [
        *((name, "jax") for name in ("unipc", "unipc 3", "flow", "dpm", "ddim", "cogvideox", "euler", "ancestral")),
        ("unipc", "cpu"), ("euler", "cpu"),
    ],
)  # fmt: skip
def test_steps_are_upstreams_the_first_time_and_later(inside, name, tables):
    from diffusers.tpu.pipelines.stepping import as_programs, steps_of

    theirs, ours, unmoved = made(name), made(name), lambda tensor: tensor
    traces = []
    with as_programs([ours]):
        for steps, seed in ((7, 0), (7, 1), (5, 2), (7, 3)):
            want = torch.stack(stepped(theirs, unmoved, steps, seed))
            got = on_host(stepped(ours, inside, steps, seed, tables=tables))
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
            traces.append(steps_of(ours).traces)
    assert type(ours) is type(theirs)
    assert traces[-1] - traces[-2] <= 3 or name == "ancestral"  # UniPC's first ones see what the schedule before left
    programs = [one for steps in steps_of(ours).recorded.values() for one in steps.values() if one is not None]
    assert bool(programs) == (name != "ancestral")  # it draws noise: operation by operation, the same noise


@pytest.mark.parametrize("name, executables", [("unipc", 4), ("flow", 1)])  # first, second, middle, last
def test_steps_that_differ_in_numbers_are_one_executable(inside, name, executables):
    from diffusers.tpu.pipelines import stepping

    stepping.jitted_by_text.clear()
    scheduler = made(name)
    with stepping.as_programs([scheduler]):
        stepped(scheduler, inside, 20, tables="jax")
    (steps,) = stepping.steps_of(scheduler).recorded.values()
    assert len(steps) == 20
    assert len(stepping.jitted_by_text) <= executables


@pytest.mark.parametrize(
    "change", ["table in place", "table by numpy", "table on the chips", "attribute", "configuration"]
)
def test_what_somebody_changes_between_steps_is_seen(inside, change):
    from diffusers.tpu.pipelines.stepping import as_programs

    def changed(scheduler):
        if change in ("table in place", "table on the chips"):
            scheduler.sigmas[4:] *= 0.5
        elif change == "table by numpy":
            scheduler.sigmas.numpy()[4:] *= 0.5
        elif change == "attribute":
            scheduler.disable_corrector = [3, 4]
        else:
            scheduler.register_to_config(solver_order=1)

    name, tables = ("flow", "jax") if change == "table on the chips" else ("unipc", "cpu")
    theirs, ours = made(name), made(name)
    with as_programs([ours]):
        stepped(ours, inside, seed=4, tables=tables)  # without the change, so that a stale program is there
        want = torch.stack(stepped(theirs, lambda tensor: tensor, seed=4, change=changed))
        got = on_host(stepped(ours, inside, seed=4, change=changed, tables=tables))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
