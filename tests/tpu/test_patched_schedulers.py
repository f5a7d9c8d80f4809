"""UniPC and Helios, whose systems are solved in float32 at least. Oracle: upstream's own schedulers, bit for bit."""

import pytest
import torch

from conftest import assert_same
from diffusers.schedulers import scheduling_helios, scheduling_unipc_multistep


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
    theirs, options = (
        upstream("diffusers.schedulers.scheduling_helios").HeliosScheduler,
        {"scheduler_type": "unipc", **options},
    )
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
