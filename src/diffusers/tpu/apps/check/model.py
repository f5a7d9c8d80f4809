"""Stage 7, a whole model: compared with upstream on the host in one process, its seconds per step with the plan's; its kernels."""

import re
import statistics
import time
from pathlib import Path

import torch

from ... import TPUConfig, install, planner, report, uninstall
from ...pipelines.pipeline import installation
from ..cli.timing import Stopwatch, compile_seconds
from . import wan
from .chips import devices_here, topology_of
from .programs import soon


def run(rows, request: dict):
    devices, cache = devices_here(), Path(request["cache"])
    size, pipe = wan.size_of(request, len(devices)), wan.make_pipeline(request["heads"])
    pipe.save_pretrained(cache / "model")
    asked = {"arguments": size, "seconds": request["plan_seconds"]}
    plan = soon(planner.plan, str(cache / "model"), topology_of(devices, request).name, **asked)
    with torch.no_grad():
        exact = wan.call(pipe, size)
        theirs = relative(wan.call(wan.make_pipeline(request["heads"], torch.bfloat16), size), exact)
    note, step = "against upstream in float32 on the host", None
    with rows.trying("model in float32"):
        check_model(rows, request, wan.make_pipeline(request["heads"]), size, exact, request["float32"], note)
    with rows.trying("model in bfloat16"):
        pipe, limit = wan.make_pipeline(request["heads"], torch.bfloat16), request["bfloat16_over_upstream"] * theirs
        step = check_model(rows, request, pipe, size, exact, limit, f"{note}, whose own error is {theirs:.3g}")
    planned, why = None, ""
    try:
        planned = plan.result(request["plan_seconds"])["seconds_per_step"]["total"]
    except Exception as error:  # reported in the row
        why = f"{type(error).__name__}: {error}"
    if step is not None:
        name = "seconds of a step, bfloat16"
        rows.beside_plan(name, step, planned, request.get("ratio"), why=why, unit="s")


def relative(ours, exact) -> float:
    return float((ours - exact).norm() / exact.norm())


def check_model(rows, request: dict, pipe, size: dict, exact, limit: float, note: str) -> float:
    """Adds the rows of one dtype; returns the median seconds of the steps after the first."""
    name = f"{pipe.transformer.dtype}".removeprefix("torch.")
    install(pipe, TPUConfig(**request["config"]))
    stopwatch = Stopwatch(pipe, time.perf_counter())
    with stopwatch.running():
        video = wan.call(pipe, size, **stopwatch.callback)
    rows.error(f"video in {name}", relative(video, exact), limit, note=note)
    rows.equal(f"video in {name}: two runs are equal", bool((wan.call(pipe, size) == video).all()), True)
    rows.add(f"compile in {name}", sum(compile_seconds(pipe).values()), unit="s")
    if "b" in name:
        rows.add("mesh", report(pipe)["mesh"])
        with rows.trying("kernels of its programs"):
            kernels = kernels_of(pipe)
            missing = [kernel for kernel in request["kernels"] if kernel not in kernels]
            rows.add("kernels of its programs", kernels, not missing, expected=request["kernels"], note="bfloat16")
    uninstall(pipe)
    return statistics.median(stopwatch.steps[1:])


def kernels_of(pipe) -> list[str]:
    """Names of kernels in the compiled programs' texts."""
    runners = installation(pipe).runners.values()
    programs = (program for runner in runners for program in runner.programs.values())
    texts = [one.as_text() for program in programs for one in program.executables.values()]
    return sorted({name for text in texts for name in re.findall(r"\b([a-z]\w*_kernel[a-z_]*)", text)})
