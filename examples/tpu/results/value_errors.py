"""Errors of `values_at_size.py` and their limits, as defined in its docstring."""

import math
import statistics


FLOAT32_LIMIT, BFLOAT16_FACTOR, BFLOAT16_LIMIT = 1e-4, 1.1, 1e-2
NOISE = 1e-3  # of the largest root mean square of a gradient
INPUT = "input "  # begins the name of an input's gradient


def compared(values, oracle) -> dict:
    """Returns the largest error; for gradients also its name, the median error without noise, and the number that count as noise."""
    if isinstance(oracle, dict):
        return _compared_gradients(values, oracle)
    assert [v.shape for v in values] == [o.shape for o in oracle]
    errors = [_size(v.double() - o.double()) / _size(o) for v, o in zip(values, oracle)]
    return {"error": max(errors) if not any(map(math.isnan, errors)) else math.nan}


def _compared_gradients(values: dict, oracle: dict) -> dict:
    import torch

    assert all(values[name].shape == oracle[name].shape for name in values.keys() & oracle.keys())
    zero = torch.zeros(())
    sizes = {name: _size(oracle.get(name, zero)) for name in oracle | values}
    of_inputs, of_weights = ([x for name, x in sizes.items() if _is_input(name) is kind] for kind in (True, False))
    least = {True: NOISE * max(of_inputs), False: NOISE * max(of_weights)}
    errors, plain = {}, []
    for name, size in sizes.items():
        floor = least[_is_input(name)]
        errors[name] = _size(values.get(name, zero) - oracle.get(name, zero)) / max(size, floor)
        plain += [errors[name]] if size >= floor else []
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    noise = len(errors) - len(plain)
    return {"error": errors[worst], "worst": worst, "median": statistics.median(plain), "noise": noise}


def limits(dtype: str, own: dict) -> dict:
    """Returns upper limits of the figures of `compared`, by name. `own`: upstream's figures in this dtype."""
    if dtype == "float32":
        return {"error": FLOAT32_LIMIT}
    return {name: max(BFLOAT16_FACTOR * own[name], BFLOAT16_LIMIT) for name in ("error", "median") if name in own}


def _size(t) -> float:
    """Returns the root mean square of a tensor's elements."""
    import torch

    return torch.linalg.vector_norm(t, dtype=torch.float64).item() / t.numel() ** 0.5


def _is_input(name: str) -> bool:
    return name.startswith(INPUT)


def spread(values) -> dict:
    """Returns shapes and standard deviations; for gradients their number and the root mean square of all elements."""
    if isinstance(values, dict):
        squares = sum(_size(v) ** 2 * v.numel() for v in values.values()) / sum(v.numel() for v in values.values())
        return {"gradients": len(values), "std": [float(f"{squares**0.5:.4g}")]}
    return {"output": [list(v.shape) for v in values], "std": [float(f"{v.std().item():.4g}") for v in values]}
