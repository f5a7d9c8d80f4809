"""Stage 4, kernels: error against the reference, equal bits of two runs, seconds over the plan's; published and ragged sizes."""

import functools

import jax

from ...kernels.attention.softmax_modes import BOUND, ModeCounter
from . import cases
from .chips import devices_here, topology_of
from .programs import error_of, measured_seconds, planning, same_bits


def run(rows, request: dict):
    devices = devices_here()
    plan = planning(f"{cases.__name__}:programs", request, topology_of(devices, request).name)
    seconds = {}
    for name, program in cases.programs(request, devices).items():
        kernel, size = name.split()
        with rows.trying(f"{name}: runs"):
            compiled = program.compile()
            for mode in cases.KERNELS[kernel].modes:
                seconds[name, mode] = check_kernel(rows, request, program, compiled, kernel, size, mode)
        if kernel == "attention" and size == "ragged":
            with rows.trying("attention: modes"):
                check_modes(rows, request, program)
    if len(devices) == 1:
        rows.skip("exchange and sum", "there is one device")
    compare_with_plan(rows, request, seconds, plan)


def title(kernel: str, size: str, mode: str, request: dict) -> str:
    return f"{' '.join(filter(None, (kernel, mode)))}, {size} {'x'.join(map(str, request[size][kernel]))}"


def check_kernel(rows, request: dict, program, compiled, kernel: str, size: str, mode: str) -> float:
    """Adds two rows; returns the median seconds of a run."""
    of, name = cases.KERNELS[kernel], title(kernel, size, mode, request)
    arrays = jax.jit(lambda key: of.arguments(request[size][kernel], key, mode))(jax.random.key(1))
    arguments = program.placed(arrays)
    first = compiled(*arguments)
    rows.error(f"{name}: error", error_of(first, jax.jit(of.reference)(*arrays)), request["error"])
    rows.equal(f"{name}: two runs are equal", same_bits(first, compiled(*arguments)), True)
    return measured_seconds(functools.partial(compiled, *arguments), request["repeats"])


def check_modes(rows, request: dict, program):
    """Adds a row for each mode: the mode that the kernel reports for inputs made for this one."""
    of, tally = cases.KERNELS["attention"], ModeCounter()
    counted = jax.jit(functools.partial(program.function.func, program.function.args[0], tally))
    for mode in of.modes:
        arrays = jax.jit(lambda key: of.arguments(request["ragged"]["attention"], key, mode))(jax.random.key(1))
        tally.clear()
        jax.block_until_ready(counted(*arrays))
        jax.effects_barrier()
        shares = next(iter(tally.shares().values()), {})
        most = max(shares, key=shares.get, default=None)
        rows.equal(f"attention {mode}: mode of all blocks", most, mode, note=str(shares))


def compare_with_plan(rows, request: dict, seconds: dict, plan):
    planned = {}
    with rows.trying("plan of the kernels"):
        planned = plan.result()
    for (name, mode), measured in seconds.items():
        found = planned.get(name)
        expected = found.get(mode or BOUND) if isinstance(found, dict) else None
        of = f"{title(*name.split(), mode, request)}: seconds"
        rows.beside_plan(of, measured, expected, request.get("ratio"), why=found, unit="s")
