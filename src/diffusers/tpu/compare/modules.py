"""One component in two forms on the same input, submodule by submodule: where they part.

The method and its ladder are those of a guide to moving a VAE from PyTorch to JAX (CogVideoX, 2025; its section on numerical
checks): compare from the smallest layer up, each rung with a threshold of its own. There errors are absolute, of values
around one; here they are divided by the oracle's mean magnitude (`Error.relative`), and what a submodule gets wrong already
is told from what it does itself:

    limit = max(rung x widening, 16 x the error of its inputs, 1.25 x upstream's own error in this dtype)

`widening`: how much less exact float32 is on the chips than on the host (`roundings`); 1 on simulated ones.

A submodule whose error is above its limit parts by itself. The first one is, of those that have no such submodule inside of
them, the first to be computed. Rungs above a block's, which the guide lets grow to 0.1 for what piles up, are not needed.
"""

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..config import TPUConfig
from ..pipelines.attach import target_devices
from .forms import Captured, Form, ModuleCall, Value, run_form
from .matching import Error, error_of
from .pipelines import LOW_PRECISION_FACTOR, Call, draw_arguments, load, modules, record
from .roundings import Widening, widening


LADDER = (  # the guide's grades of an error
    (1e-6, "perfect"),
    (1e-4, "excellent"),
    (1e-3, "good"),
    (1e-2, "warning"),
    (1e-1, "attention"),
    (math.inf, "severe"),
)
NO_EFFECT = 1e-3  # of an error, where what the submodule is part of has less
# The guide's thresholds: of a convolution, of a norm (here also of a function), of a residual block.
LAYER, NORM, BLOCK = 1e-6, 1e-5, 1e-4
GROWTH = 16.0  # of an error in one submodule that does nothing wrong; the guide measured 14, in a group norm


@dataclass(frozen=True)
class ModuleRow:
    """One submodule, the worst of its calls.

    Attributes:
        name, kind: in upstream's component, empty for the component itself; its class.
        calls: how many there were.
        error: of what it gave.
        inherited: the largest error of what it took; None where none of that could be compared.
        own: upstream's error in the dtype compared; None in the oracle's dtype.
        limit: of `error.relative`.
        shape, spec, chips: of what it gave first, in the form compared.
        finite: whether all of that is.
    """

    name: str
    kind: str
    calls: int
    error: Error
    inherited: float | None
    own: float | None
    limit: float
    shape: tuple[int, ...]
    spec: str
    chips: int
    finite: bool

    @property
    def ok(self) -> bool:
        """Whether it does not part by itself; NaN does."""
        return self.error.relative <= self.limit

    @property
    def growth(self) -> float | None:
        """Its error by the largest of its inputs'; None where those have none."""
        return self.error.relative / self.inherited if self.inherited else None

    @property
    def grade(self) -> str:
        return graded(self.error.relative)


@dataclass(frozen=True)
class Comparison:
    """Every submodule that both forms compute, in the order of the oracle's.

    Attributes:
        form, against, entry, component: what was compared with what.
        left_out: submodules that the oracle computes and the form does not show, and why.
        first: the first that parts by itself; None: none does.
        not_finite: the first that gives NaN or an infinity, and took none; None: none does.
    """

    component: str
    entry: str
    form: str
    against: str
    rows: list[ModuleRow]
    left_out: dict[str, str]
    first: str | None
    not_finite: str | None

    @property
    def ok(self) -> bool:
        return self.first is None and self.not_finite is None and bool(self.rows)

    def as_dict(self) -> dict:
        """For JSON."""
        rows = [
            {**dataclasses.asdict(row), "growth": row.growth, "grade": row.grade, "ok": row.ok} for row in self.rows
        ]
        return {**dataclasses.asdict(self), "rows": rows, "ok": self.ok}


def graded(error: float) -> str:
    """The guide's word for an error; NaN is severe."""
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
    """The comparison of each entry of a pipeline's component that one small run calls, or of one.

    All values are kept on the host. Both forms have the weights that the model has in `form`'s dtype.

    Args:
        model, arguments, seed: as of `compare_each`.

    Raises ValueError for a component or an entry that the run does not call; else as `run_form`.
    """
    seed = random.randrange(2**31) if seed is None else seed
    pipe = load(model, form.dtype)
    if component not in modules(pipe):
        raise ValueError(f"expected a component among {', '.join(modules(pipe))}, got {component!r}")
    calls, _ = record(pipe, {**draw_arguments(type(pipe), seed), **(arguments or {})}, seed)
    calls = [call for call in calls if call.module == component]
    wanted = [call for call in calls if entry in (None, call.entry)]
    if not wanted:
        raise ValueError(
            f"expected an entry of {component} that a run calls ({', '.join(c.entry for c in calls) or 'none'}), got {entry!r}"
        )
    for call in wanted:
        yield compare_modules(modules(pipe)[component], form, call, against)


def compare_modules(
    module: torch.nn.Module,
    form: Form,
    call: Call,
    against: Form = Form("upstream"),
    ours: torch.nn.Module | None = None,
) -> Comparison:
    """Both forms of a component, submodule by submodule.

    Args:
        module: upstream's, not on the TPU path.
        call: of one of its entries, recorded in `form`'s dtype.
        ours: what `form` runs; None: `module`.

    Raises: as `run_form`.
    """
    oracle = run_form(module, against, call)
    found = run_form(module if ours is None else ours, form, call)
    own = None
    if form.dtype != against.dtype:
        own = run_form(module, Form("upstream", form.dtype), call)
    config, wider = TPUConfig(), Widening()
    if {form.kind, against.kind} != {"upstream"}:
        wider = widening(target_devices()[0], config.matmul_precision, config.convolution_precision)
    return compared(oracle, found, own, call, str(form), str(against), wider)


def compared(
    oracle: Captured,
    found: Captured,
    own: Captured | None,
    call: Call,
    form: str,
    against: str,
    wider: Widening = Widening(),
) -> Comparison:
    """The comparison of what was captured. `own`: upstream's in the dtype of `found`; `wider`: of the rungs."""
    left_out, rows, last, parted = {}, {}, 0.0, []
    parents = {name[:at] for name in oracle.kinds for at in range(len(name)) if name[at] == "."} | {""}
    places = {id(c): n for calls in oracle.by_name.values() for n, c in enumerate(calls)}
    for made in oracle.calls:
        name, place = made.name, places[id(made)]
        theirs = oracle.by_name[name]
        ours = _pieces(found.by_name.get(name, []), len(theirs), place)
        reason = _left_out(name, len(theirs), found)
        kind = oracle.kinds.get(name, "")
        rung = BLOCK if name in parents else LAYER if name in oracle.weighted and "norm" not in kind.lower() else NORM
        rung *= wider.convolutions if _convolves(name, oracle.kinds) else wider.plain
        row = None if reason else _row(made, ours, kind, rung, last)
        if row is None:
            left_out[name] = reason or f"gives {_shapes(ours[0])}, the oracle {_shapes(made)}"
            continue
        mine = own and own.by_name.get(name, [])
        if mine and len(mine) == len(theirs):
            worst = _worst([mine[place].answered], made.answered)
            if worst is not None:
                limit = max(row.limit, LOW_PRECISION_FACTOR * worst.relative)
                row = dataclasses.replace(row, own=worst.relative, limit=limit)
        last = row.error.relative
        if not row.ok:
            parted.append(name)
        before = rows.get(name)
        row = dataclasses.replace(row, calls=1 if before is None else before.calls + 1)
        if before is not None and _excess(before) >= _excess(row):
            row = dataclasses.replace(before, calls=row.calls)
        rows[name] = row
    left_out = {name: reason for name, reason in left_out.items() if name not in rows}
    for name in dict.fromkeys(parted):
        outer = next((rows[other] for other in _outer(name) if other in rows), None)
        if outer is not None and outer.ok and outer.error.relative < NO_EFFECT * rows[name].error.relative:
            left_out[name] = (
                f"differs by {rows.pop(name).error.relative:.1e}, what it is part of does not: it is not the oracle's"
            )
    strange = [c.name for c in found.calls if not _finite(c.answered) and _finite(c.given)]
    first = innermost([name for name in parted if name in rows])
    return Comparison(call.module, call.entry, form, against, [*rows.values()], left_out, first, innermost(strange))


def _convolves(name: str, kinds: dict[str, str]) -> bool:
    return any("conv" in kind.lower() for other, kind in kinds.items() if other == name or _inside(other, name))


def _outer(name: str) -> Iterator[str]:
    """The names of what a submodule is part of, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def innermost(names: list[str]) -> str | None:
    """The first of these submodules that has none of them inside of it."""
    return next((name for name in names if not any(_inside(other, name) for other in names)), None)


def _inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _left_out(name: str, calls: int, found: Captured) -> str | None:
    if name in found.lost:
        return "is called in a branch, or in a loop whose length is a value"
    ours = len(found.by_name.get(name, ()))
    if not ours:
        return "is not called: what asks for it computes it by itself"
    return f"is called {_times(ours)}, the oracle's {_times(calls)}" if ours < calls else None


def _pieces(ours: list[ModuleCall], calls: int, place: int) -> list[ModuleCall]:
    """Those calls that together are the oracle's number `place` of so many: a form may take frames chunk by chunk.

    Upstream may leave a module out for the first chunk, where such a form computes what it throws away.
    """
    return ours[place::calls] if len(ours) % calls == 0 else ours[-calls:][place : place + 1]


def _row(oracle: ModuleCall, ours: list[ModuleCall], kind: str, rung: float, last: float) -> ModuleRow | None:
    """`last`: the error of what was computed before, which stands for that of inputs that cannot be compared."""
    error = _worst([call.answered for call in ours], oracle.answered)
    if error is None:
        return None
    taken = _worst([call.given for call in ours], oracle.given, BLOCK)
    inherited = 0.0 if not oracle.given else None if taken is None else taken.relative
    limit = max(rung, GROWTH * (last if inherited is None else inherited))
    value = ours[0].answered[min(ours[0].answered)]
    return ModuleRow(
        name=oracle.name,
        kind=kind,
        calls=1,
        error=error,
        inherited=inherited,
        own=None,
        limit=limit,
        shape=value.array.shape,
        spec=value.spec,
        chips=value.chips,
        finite=all(_finite(call.answered) for call in ours),
    )


def _worst(ours: list[dict[int, Value]], oracle: dict[int, Value], guessed: float = math.inf) -> Error | None:
    """The largest error of tensors that both have, in a layout that fits; None where there is none. `ours`: in pieces.

    `guessed`: an error above which a layout that the shape does not tell is taken for a wrong one.
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


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
