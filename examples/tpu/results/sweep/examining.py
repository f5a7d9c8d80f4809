"""One pipeline on the TPU path against upstream, in this process: the oracle is upstream in float32, same weights and inputs.

Runs, in order: upstream and ours (`error` of the whole result); the first call of each denoiser (`denoisers`; above the limit also
`rounded_inputs`, since some models round to bfloat16 inside and a last bit decides the direction); a second size, a second prompt and the
first call again (`executables`: new ones each time); the denoisers in bfloat16, compared with upstream's error in bfloat16.
"""

import contextlib
import copy
import math
import time

import numpy as np
import torch
from building import PROMPTS, arguments, build
from coverage_tables import DENOISER_LIMIT
from torch.utils._pytree import tree_map_only

from diffusers.tpu import TPUConfig, install, report
from diffusers.tpu.compare.pipelines import (
    LOW_PRECISION_FACTOR,
    Call,
    load,
    record,
    relative_error,
    run_call,
    run_pipeline,
)
from diffusers.tpu.pipelines.pipeline import installation
from diffusers.tpu.pipelines.plans import PIPELINES, model_plan


SEED = 7
SECOND_SIZE = 96
ROUNDINGS = 4
LAYOUTS = ("2,4,1", "1,1,8", "2,2,2")


class NotUpstream(Exception):
    """The pipeline could not be built, or upstream did not run."""


def examine(name: str, more: bool = True) -> dict:
    """Returns the results of the pipeline of this name on all chips; `more`: also with other sizes, prompts and bfloat16.

    Raises:
        NotUpstream: upstream itself does not run; its cause is upstream's error.
    """
    start = time.process_time()
    try:
        pipe, given = build(name), arguments(name, SEED)
        plain = copy.deepcopy(pipe)
        calls, oracle = record(plain, given, SEED)
        check(oracle)
    except Exception as error:
        raise NotUpstream from error
    found = {"upstream_seconds": round(time.process_time() - start, 1), "shapes": [list(x.shape) for x in oracle]}
    install(pipe)
    found["error"] = relative_error(run_pipeline(pipe, given, SEED), oracle)
    found |= described(pipe)
    found["executables"] = [compiled(pipe)]
    found["denoisers"] = of_denoisers(plain, pipe, calls)
    if more:
        found["second_size_error"] = None
        again(name, pipe, plain, found)
        found["bfloat16"] = in_bfloat16(plain, given, [*found["denoisers"]])
    found["seconds"] = round(time.process_time() - start, 1)
    return found


def in_layouts(name: str, known: dict) -> dict:
    """Returns for each of `LAYOUTS` the error of the whole result and of each denoiser's first call; known ones are not run again."""
    pipe, given = build(name), arguments(name, SEED)
    plain, found = copy.deepcopy(pipe), {mesh: known[mesh] for mesh in LAYOUTS if mesh in known}
    calls, oracle = record(plain, given, SEED)
    for mesh in LAYOUTS:
        if mesh not in known:
            install(pipe, TPUConfig(mesh=tuple(map(int, mesh.split(",")))))
            error = relative_error(run_pipeline(pipe, given, SEED), oracle)
            found[mesh] = {"error": error, "denoisers": of_denoisers(plain, pipe, calls)}
    return found


def check(results: list[np.ndarray]):
    """Raises ValueError for results that are constant, not finite or missing, with which any computation would agree."""
    if not results or not all(np.isfinite(x).all() and x.std() for x in results if x.size > 1):
        shapes = [(x.shape, float(np.nanstd(x)) if x.size else 0.0) for x in results]
        raise ValueError(f"expected upstream's results to be numbers that differ, got shapes and deviations {shapes}")


def described(pipe) -> dict:
    state = installation(pipe)
    eager = {name: runner.eager for name, runner in state.runners.items() if runner.eager}
    eager |= {name: ["it stays on the host"] for name in state.held if name not in state.runners}
    ran = {name for name, runner in state.runners.items() if runner.programs or runner.eager}
    planned = state.original.__name__ in PIPELINES
    status = "partly" if eager else "planned" if planned else "compiled"
    return {
        "status": status, "mesh": dict(state.mesh.shape), "glue": state.glue, "eager": eager, "models": sorted(ran),
        "planned_models": sorted(n for n in ran if model_plan(type(state.runners[n].module)) is not None),
    }  # fmt: skip


def compiled(pipe) -> int:
    return sum(part.get("compilations", 0) for part in report(pipe)["components"].values())


def of_denoisers(plain, pipe, calls: list[Call]) -> dict[str, dict]:
    """Returns the results of `of_denoiser` for each denoiser's call among these."""
    runners = {name: runner for name, runner in installation(pipe).runners.items() if runner.denoises}
    ones = (one for one in calls if one.module in runners and one.entry == "forward")
    return {one.module: of_denoiser(plain, pipe, one) for one in ones}


def of_denoiser(plain, pipe, one: Call) -> dict:
    """Returns the error of one denoiser's call; above the limit also the change of upstream's own output when its inputs are rounded."""
    oracle = run_call(plain, one)
    error = relative_error(run_call(pipe, one), oracle)
    found = {"class": type(plain.components[one.module]).__name__, "error": error}
    if error > DENOISER_LIMIT:
        found["rounded_inputs"] = max(
            relative_error(run_call(plain, rounded(one, n)), oracle) for n in range(ROUNDINGS)
        )
    return {**found, "eager": installation(pipe).runners[one.module].eager}


def rounded(one: Call, seed: int, dtype: torch.dtype = torch.float32) -> Call:
    """Returns the call with inputs of this dtype moved at random by a last bit, or not at all."""
    generator = torch.Generator().manual_seed(seed)

    def moved(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != dtype:
            return x
        return x * (1 + torch.finfo(dtype).eps * torch.randint(-1, 2, x.shape, generator=generator)).to(dtype)

    return Call(one.module, one.entry, *tree_map_only(torch.Tensor, moved, (one.args, one.kwargs)))


def again(name: str, pipe, plain, found: dict):
    """Runs a second size, a second prompt and the first call again. Upstream runs them too, as some pipelines fail at every second call."""
    counts = [compiled(pipe)]
    calls = arguments(name, SEED, size=SECOND_SIZE), arguments(name, SEED, prompt=PROMPTS[1]), arguments(name, SEED)
    for given in calls:
        oracle = ours = None
        with contextlib.suppress(ValueError, RuntimeError, IndexError, TypeError, AssertionError):
            oracle = run_pipeline(plain, given, SEED)
        with contextlib.suppress(*([Exception] if oracle is None else [])):  # where upstream stops, ours may
            ours = run_pipeline(pipe, given, SEED)
        of_second_size = given is calls[0] and oracle is not None
        if of_second_size and [x.shape for x in oracle] != [tuple(shape) for shape in found["shapes"]]:
            found["second_size_error"] = relative_error(ours, oracle)
        counts.append(compiled(pipe))
    found["executables"] += [*(after - before for before, after in zip(counts, counts[1:]))]


def in_bfloat16(plain, given: dict, names: list[str]) -> dict:
    """Returns, for each denoiser's calls in upstream's run in bfloat16, our error, upstream's, and whether ours is within limits: root
    mean squares, also of calls whose inputs are moved by a last bit. Of one call of few numbers it is 0.7 to 1.3 by chance.

    Where upstream does not run, returns its error.
    """
    half = load(plain, torch.bfloat16)
    try:
        calls, _ = record(half, given, SEED)
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        return {name: {"upstream_stops": f"{type(error).__name__}: {str(error)[:200]}"} for name in names}
    calls = [one for one in calls if one.module in names and one.entry == "forward"]
    calls += [rounded(one, n, torch.bfloat16) for one in calls for n in range(ROUNDINGS)]
    pairs = [(run_call(plain, one.copied(widen=True)), run_call(half, one)) for one in calls]
    install(half)
    errors, found = {}, {}
    for one, (oracle, theirs) in zip(calls, pairs):
        both = relative_error(run_call(half, one), oracle), relative_error(theirs, oracle)
        errors.setdefault(one.module, []).append(both)
    for name, pairs in errors.items():
        error, own = (math.sqrt(sum(x**2 for x in one) / len(one)) for one in zip(*pairs))
        found[name] = {"error": error, "upstream": own, "holds": error <= LOW_PRECISION_FACTOR * own}
    return found
