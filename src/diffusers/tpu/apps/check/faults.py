"""Stage 8, faults: the runtime's errors for too little memory and for a second process, and the errors that we raise for them."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp

from ...chips.devices import compile_lowered, compiler_options
from ...chips.figures import chip_of_kind
from ...common.errors import Failure, within_hbm
from .chips import devices_here


SECOND = "from diffusers.tpu.apps.check.chips import devices_here; print(len(devices_here()))"


def run(rows, request: dict):
    devices = devices_here()
    size = request.get("bytes") or 2 * chip_of_kind(devices[0].device_kind).hbm_bytes
    side = int((size / 4) ** 0.5)
    check(rows, "an allocation that no chip has room for", lambda: jnp.zeros(size // 4, "float32").block_until_ready())
    check(rows, "a program that no chip has room for", lambda: run_too_large(devices[0], side))
    x = jnp.ones(8) + 1
    rows.equal("the chip works afterwards", float(x.sum()), 16.0)
    second_process(rows, request["second_process_is_refused"], request["second_seconds"])


def run_too_large(device, side: int):
    """Runs two products with a square matrix between them that must be whole in memory, compiled as our programs are."""

    def function(x):
        a = jnp.full((side, 8), x)
        return ((a @ a.T) @ a).sum()

    compiled = compile_lowered(jax.jit(function).lower(1.0), compiler_options(device, False))
    jax.block_until_ready(compiled(1.0))


def check(rows, name: str, fails):
    """Calls `fails`; adds rows with the error that we raise and with the runtime's."""
    raw = None
    try:
        with within_hbm(lambda: f"for {name}", lambda: "diffusers-tpu plan"):
            try:
                fails()
            except Exception as error:
                raw = f"{type(error).__name__}: {error}"[:1500]
                raise
    except Failure as error:
        rows.add(name, type(error).__name__, type(error).__name__ == "OutOfHBM", expected="OutOfHBM", note=str(error))
    except Exception as error:
        rows.add(name, type(error).__name__, False, expected="OutOfHBM", note="it was not recognised")
    else:
        return rows.add(name, "nothing", "failed", expected="OutOfHBM", note="it had room, or was never allocated")
    rows.add(f"{name}: as the runtime says it", raw)


def second_process(rows, refused: bool, seconds: float):
    name = "a second process"
    try:
        done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return rows.add(name, None, "timed out", expected="ChipBusy", limit=seconds, unit="s")
    errors = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Busy|NoChip)): (.*)", done.stderr, re.M)
    if not refused:
        return rows.skip(name, "simulated chips are each process's own", expected="ChipBusy")
    measured, sentence = errors[-1] if errors else ("nothing", done.stdout or done.stderr[-500:])
    rows.equal(name, measured, "ChipBusy", note=sentence)
    rows.add(f"{name}: as the runtime says it", errors[0][1] if errors else "")
