"""The benchmarks of `diffusers-tpu bench`, and the scripts that measure or compile their rows.

The wheel does not contain them: the command line puts the folder above this one on `sys.path`.
"""

import functools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from diffusers.tpu.planner import sources


ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def run_module(name: str, *arguments: str, seconds: float | None = None, **environment: str) -> dict:
    """Returns the JSON in the last line of `python -m bench.NAME`, run on simulated chips, once for equal arguments.

    Raises:
        RuntimeError: the process failed.
    """
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", f"{__name__}.{name}", *arguments],
        env={**os.environ, "DIFFUSERS_TPU": "cpu", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        raise RuntimeError(
            f"expected an answer of {name}, its process ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def versions(**more: str) -> dict[str, str]:
    """Returns the `versions` of a row that is measured on this machine."""
    return {"python": platform.python_version(), "machine": platform.machine(), **more, "sources": sources()}
