"""Compares one component in two forms on the same input, submodule by submodule, and finds the first that is above its limit.

    limit = max(rung x widening, 16 x the error of its inputs, 1.25 x upstream's own error in this dtype)

Rungs and grades are those of a guide to moving a VAE from PyTorch to JAX (CogVideoX, 2025), for errors relative to the oracle's mean
magnitude.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from diffusers.tpu.compare.pipelines import LOW_PRECISION_FACTOR, Call, draw_arguments, load, record
from diffusers.tpu.compare.roundings import Widening, widening_here
from diffusers.tpu.pipelines.components import modules_of

from .forms import Captured, Form, ModuleCall, Value, run_form
from .matching import Error, error_of


LADDER = (  # the guide's grades of an error
    (1e-6, "perfect"),
    (1e-4, "excellent"),
    (1e-3, "good"),
    (1e-2, "warning"),
    (1e-1, "attention"),
    (math.inf, "severe"),
)
# A submodule is not the oracle's if the error of a module around it is below this share of its own.
NO_EFFECT = 1e-3
# The guide's thresholds: of a convolution, of a norm (here also of a function), of a residual block.
LAYER, NORM, BLOCK = 1e-6, 1e-5, 1e-4
GROWTH = 16.0  # of an error in one correct submodule; the guide measured 14, in a group norm


@dataclass(frozen=True)
class ModuleRow:
    """One submodule, at the call that is nearest to its limit or furthest above it."""

    name: str  # in upstream's component, empty for the component itself
    kind: str  # its class
    calls: int
    error: Error  # of its outputs
    inherited: float | None  # the largest error of its inputs; None where no input could be compared
    own: float | None  # upstream's error in the dtype compared; None in the oracle's dtype
    limit: float  # of `error.relative`
    shape: tuple[int, ...]  # of its first output in the form compared, as are `spec` and `chips`
    spec: str
    chips: int
    finite: bool  # whether all its outputs are

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error.relative <= self.limit

    @property
    def growth(self) -> float | None:
        """The error divided by the largest error of the inputs; None where they have none."""
        return self.error.relative / self.inherited if self.inherited else None

    @property
    def grade(self) -> str:
        return graded(self.error.relative)


@dataclass(frozen=True)
class Comparison:
    """The comparison of every submodule that both forms compute, in the oracle's order."""

    component: str
    entry: str
    form: str
    against: str
    rows: list[ModuleRow]
    left_out: dict[str, str]  # submodules that the oracle computes and the form does not show, and why
    first: str | None  # submodule above its limit, None if there is none
    not_finite: str | None  # first submodule with NaN or infinities in its output alone, None if there is none

    @property
    def ok(self) -> bool:
        return self.first is None and self.not_finite is None and bool(self.rows)

    def as_dict(self) -> dict:
        """Returns the comparison as JSON holds it."""
        rows = [{**asdict(row), "growth": row.growth, "grade": row.grade, "ok": row.ok} for row in self.rows]
        return {**asdict(self), "rows": rows, "ok": self.ok}


def graded(error: float) -> str:
    """Returns the guide's grade of an error; NaN is severe."""
    return next((word for limit, word in LADDER if error < limit), LADDER[-1][1])


def compare_component(
    model,
    component: str,
    form: Form,
    against: Form = Form("upstream"),
    entry: str | None = None,
    arguments: dict | None = None,
    seed: int | None = None,
) -> Iterator[Comparison]:
    """Yields the comparison of each entry of a component that one small run calls, or of `entry` alone.

    All values are copied to the host. Both forms have the model's weights in the dtype of `form`.

    Args:
        model: as in `compare_each`.
        arguments: of the pipeline's call; they replace those of `draw_arguments`.
        seed: of prompt and noise; None draws one.

    Raises:
        ValueError: a component or an entry that the run does not call; also what `run_form` raises.
    """
    seed = random.randrange(2**31) if seed is None else seed
    pipe = load(model, form.dtype)
    models = modules_of(pipe)
    if component not in models:
        raise ValueError(f"expected a component among {', '.join(models)}, got {component!r}")
    calls, _ = record(pipe, {**draw_arguments(type(pipe), seed), **(arguments or {})}, seed)
    calls = {call.entry: call for call in calls if call.module == component}
    wanted = [call for name, call in calls.items() if entry in (None, name)]
    if not wanted:
        raise ValueError(
            f"expected an entry of {component} that a run calls ({', '.join(calls) or 'none'}), got {entry!r}"
        )
    exact = form.kind == against.kind == "upstream"
    module, wider = models[component], Widening() if exact else widening_here()
    for call in wanted:
        oracle, found = run_form(module, against, call), run_form(module, form, call)
        own = None if form.dtype == against.dtype else run_form(module, Form("upstream", form.dtype), call)
        yield compared(oracle, found, own, call, str(form), str(against), wider)


def compared(
    oracle: Captured,
    found: Captured,
    own: Captured | None,
    call: Call,
    form: str,
    against: str,
    wider: Widening = Widening(),
) -> Comparison:
    """Returns the comparison of captured values.

    Args:
        own: upstream's values in the dtype of `found`, None where that is the oracle's dtype.
        wider: factors of the rungs on these chips.
    """
    left_out, rows, last, parted, rungs = {}, {}, 0.0, [], _rungs(oracle.module, wider)
    kinds = {name: type(part).__name__ for name, part in oracle.module.named_modules()}
    places = {id(c): n for calls in oracle.by_name.values() for n, c in enumerate(calls)}
    for made in oracle.calls:
        name, place, calls = made.name, places[id(made)], len(oracle.by_name[made.name])
        ours, before = found.by_name.get(name, []), rows.get(name)
        reason = _left_out(name, calls, len(ours), found)
        ours = [] if reason else _pieces(ours, calls, place)
        row = _row(made, ours, kinds.get(name, ""), rungs.get(name, NORM), last) if ours else None
        if row is None:
            left_out[name] = reason or f"gives {_shapes(ours[0])}, the oracle {_shapes(made)}"
            continue
        mine = [] if own is None else own.by_name.get(name, [])
        worst = _worst([mine[place].answered], made.answered) if len(mine) == calls else None
        if worst is not None:
            row = replace(row, own=worst.relative, limit=max(row.limit, LOW_PRECISION_FACTOR * worst.relative))
        last = row.error.relative
        parted += [] if row.ok else [name]
        if before is not None and _excess(before) >= _excess(row):
            row = replace(before, calls=before.calls + 1)
        elif before is not None:
            row = replace(row, calls=before.calls + 1)
        rows[name] = row
    left_out = {name: reason for name, reason in left_out.items() if name not in rows}
    for name in dict.fromkeys(parted):
        parts = name.split(".")
        outer = next((rows[o] for n in range(len(parts)) if (o := ".".join(parts[:~n])) in rows and o != name), None)
        if outer is not None and outer.ok and outer.error.relative < NO_EFFECT * rows[name].error.relative:
            error = rows.pop(name).error.relative
            left_out[name] = f"differs by {error:.1e}, what it is part of does not: it is not the oracle's"
    strange = [c.name for c in found.calls if not _finite(c.answered) and _finite(c.given)]
    first = innermost([name for name in parted if name in rows])
    return Comparison(call.module, call.entry, form, against, [*rows.values()], left_out, first, innermost(strange))


def _rungs(module: torch.nn.Module, wider: Widening) -> dict[str, float]:
    """Returns the rung of each submodule, which may be a block, a layer with weights, a norm or a function."""
    rungs = {}
    for name, part in module.named_modules():
        layer = part._parameters and "norm" not in type(part).__name__.lower()
        rung = BLOCK if next(part.children(), None) is not None else LAYER if layer else NORM
        rungs[name] = rung * wider.of(part)
    return rungs


def innermost(names: list[str]) -> str | None:
    """Returns the first of these submodules that contains none of the others."""
    inner = {name: f"{name}." if name else "" for name in names}
    return next((n for n in names if not any(o != n and o.startswith(inner[n]) for o in names)), None)


def _left_out(name: str, calls: int, ours: int, found: Captured) -> str | None:
    if name in found.lost:
        return "is called in a branch, or in a loop whose length is a value"
    if not ours:
        return "is not called: what asks for it computes it by itself"
    ours_, theirs = ("once" if number == 1 else f"{number} times" for number in (ours, calls))
    return f"is called {ours_}, the oracle's {theirs}" if ours < calls else None


def _pieces(ours: list[ModuleCall], calls: int, place: int) -> list[ModuleCall]:
    """Returns the calls that together are call number `place` of the oracle's `calls`: a form may call a module for each chunk of frames.

    Upstream may skip a module in the first chunk, where such a form calls it and drops the result.
    """
    return ours[place::calls] if len(ours) % calls == 0 else ours[-calls:][place : place + 1]


def _row(oracle: ModuleCall, ours: list[ModuleCall], kind: str, rung: float, last: float) -> ModuleRow | None:
    """Returns the row of one call; `last`, the error of the row before, replaces that of inputs that cannot be compared."""
    error = _worst([call.answered for call in ours], oracle.answered)
    if error is None:
        return None
    taken = _worst([call.given for call in ours], oracle.given, BLOCK)
    inherited = 0.0 if not oracle.given else None if taken is None else taken.relative
    limit = max(rung, GROWTH * (last if inherited is None else inherited))
    first = ours[0].answered[min(ours[0].answered)]
    lies = first.array.shape, first.spec, first.chips
    return ModuleRow(
        oracle.name, kind, 1, error, inherited, None, limit, *lies, all(_finite(c.answered) for c in ours)
    )


def _worst(ours: list[dict[int, Value]], oracle: dict[int, Value], guessed: float = math.inf) -> Error | None:
    """Returns the largest error of tensors that both have in a layout that fits; None where there is none.

    Args:
        ours: the pieces of each tensor.
        guessed: above this error a layout that needs cutting is not used.
    """
    pairs = [error_of([of[n] for of in ours], oracle[n]) for n in oracle if all(n in of for of in ours)]
    found = [error for error, sure in filter(None, pairs) if sure or error.relative <= guessed]
    return max(found, key=lambda error: np.nan_to_num(error.relative, nan=np.inf), default=None)


def _finite(values: dict[int, Value]) -> bool:
    return all(np.isfinite(value.array).all() for value in values.values())


def _excess(row: ModuleRow) -> float:
    return np.nan_to_num(row.error.relative / row.limit, nan=np.inf)


def _shapes(call: ModuleCall) -> str:
    return ", ".join(str(list(value.array.shape)) for value in call.answered.values()) or "nothing"
