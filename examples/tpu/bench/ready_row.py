"""Time from a process's start to its first denoising step, measured on this machine for the shipped model on eight simulated chips.

The same script runs twice with one cache, empty at first; the second process loads the executables of the first.
"""

import functools
import json
import sys
import tempfile
import time

from . import run_module, versions
from .cache_row import MODEL


RUNS = ("first", "second")
CALL = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 16, "guidance_scale": 2.0}


def answer(run: str) -> dict:
    """Returns a row of the "first" or the "second" process.

    In seconds from its start: packages `imported`, weights `placed` on the chips, first step done (`stepped`). Counts: `traces` and
    `compilations` of models, their executables loaded from the cache (`recalled`), and small programs compiled
    (`compiled_small`) or loaded (`read_small`).
    """
    return {**_measured()[run], "versions": versions()}


@functools.cache
def _measured() -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {"DIFFUSERS_TPU_DEVICES": "8", "DIFFUSERS_TPU_CACHE": cache}
        return {run: run_module("ready_row", repr(time.monotonic()), **environment) for run in RUNS}


def main(start: float):
    """Runs the model and prints a row. `start`: the time of the process's launch, by `time.monotonic`, which all processes share."""
    seen = {"cache_hits": 0, "cache_misses": 0}

    import jax

    def count(event: str, **_):
        name = event.rpartition("/")[2]
        if name in seen:
            seen[name] += 1

    jax.monitoring.register_event_listener(count)
    import torch

    import diffusers
    from diffusers.tpu import report

    row = {}
    cls = diffusers.WanPipeline
    row["imported"] = time.monotonic() - start
    pipe = cls.from_pretrained(MODEL).to("cuda")
    row["placed"] = time.monotonic() - start
    pipe.set_progress_bar_config(disable=True)

    def stepped(pipe, step, t, given):
        given["latents"].numpy()
        row.setdefault("stepped", time.monotonic() - start)
        return given

    pipe("a red circle moving right", generator=torch.Generator().manual_seed(6), callback_on_step_end=stepped, **CALL)
    components = report(pipe)["components"].values()
    row["traces"] = sum(component["traces"] for component in components)
    row["compilations"] = sum(component["compilations"] for component in components)
    row["recalled"] = sum(program["recalled"] for component in components for program in component["programs"])
    print(json.dumps({**row, "compiled_small": seen["cache_misses"], "read_small": seen["cache_hits"]}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
