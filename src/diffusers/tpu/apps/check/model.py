"""Stage 7, a whole model: compared with upstream on the host in one process, its seconds per step with the plan's; its kernels."""

import re
import statistics
import threading
import time
from pathlib import Path

import torch

from ... import TPUConfig, install, planner, report, uninstall
from ...pipelines.pipeline import installation
from ..cli.timing import Stopwatch
from . import wan
from .chips import devices_here, topology_of


def run(rows, request: dict):
    devices, cache = devices_here(), Path(request["cache"])
    size, pipe = wan.size_of(request, len(devices)), wan.make_pipeline(request["heads"])
    pipe.save_pretrained(cache / "model")
    plans: dict = {}
    asked = {"arguments": size, "seconds": request["plan_seconds"]}
    thread = threading.Thread(
        target=_plan, args=(plans, str(cache / "model"), topology_of(devices, request).name, asked), daemon=True
    )
    thread.start()
    with torch.no_grad():
        exact = wan.call(pipe, size)
        theirs = relative(wan.call(wan.make_pipeline(request["heads"], torch.bfloat16), size), exact)
    seconds = {}
    for dtype, limit in (
        (torch.float32, request["float32"]),
        (torch.bfloat16, request["bfloat16_over_upstream"] * theirs),
    ):
        name = f"{dtype}".removeprefix("torch.")
        with rows.trying(f"model in {name}"):
            note = "against upstream in float32 on the host" + (
                f", whose own error is {theirs:.3g}" if "b" in name else ""
            )
            pipe = wan.make_pipeline(request["heads"], dtype)
            seconds[name] = check_model(rows, request, pipe, size, exact, limit, note)
    thread.join(request["plan_seconds"])
    if (step := seconds.get("bfloat16")) is not None:
        how = {"why": plans.get("error", "in time"), "unit": "s"}
        rows.beside_plan("seconds of a step, bfloat16", step, plans.get("seconds"), request.get("ratio"), **how)


def _plan(found: dict, model: str, topology: str, asked: dict):
    try:
        found["seconds"] = planner.plan(model, topology, **asked)["seconds_per_step"]["total"]
    except Exception as error:  # reported in the row
        found["error"] = f"{type(error).__name__}: {error}"


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
    found = report(pipe)["components"]
    rows.add(
        f"compile in {name}", sum(p["compile_seconds"] for one in found.values() for p in one["programs"]), unit="s"
    )
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
