"""Cost of checking a module before each of its calls, measured on this machine's processor with modules on the meta device."""

import time
import timeit
from collections.abc import Callable

import torch

from diffusers.tpu.compile.state import read
from diffusers.tpu.compile.weights import quick_versions
from diffusers.tpu.planner.building import build, configuration_of

from . import versions


MODULES = 1000
TIMES = 3000


def answer(model: str) -> dict:
    """Returns `check_microseconds` for an unchanged module, and `read_milliseconds` for reading its state again after a change.

    Args:
        model: "linear-1000" for a module of a thousand submodules, or a published model, whose denoiser is checked.
    """
    module = _thousand() if model == "linear-1000" else build(configuration_of(model), torch.bfloat16).transformer
    start = time.perf_counter()
    state = read(module)
    reading = time.perf_counter() - start
    before = quick_versions(state.tensors)
    return {
        "submodules": sum(1 for _ in module.modules()),
        "tensors": len(state.tensors),
        "check_microseconds": 1e6 * _least(lambda: state.same() and quick_versions(state.tensors) == before),
        "read_milliseconds": 1e3 * reading,
        "versions": versions(torch=torch.__version__),
    }


def _thousand() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(MODULES - 1)))


def _least(look: Callable[[], bool]) -> float:
    """Returns the seconds of the quickest of `TIMES` checks, as other load only adds to them."""
    assert look()
    return min(timeit.repeat(look, number=1, repeat=TIMES))
