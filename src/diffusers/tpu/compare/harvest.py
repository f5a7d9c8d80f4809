"""Marked values as outputs of their program: what `bridge.captures` marked in a trace, the program gives beside its own answer.

The trace is gone through operation by operation. A loop over a known length gives its marked values stacked, [steps, ...];
a part that each chip computes for itself gives them by chip, [chips, ...]. Of a branch, or of a loop whose length is a
value, nothing can be handed out: what was marked there is `lost`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import PartitionSpec

from ..compile.tracing import Marked, Tag, capture_p


INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
INLINED |= {"remat2": "jaxpr", "checkpoint": "jaxpr"}


LOOP, CHIPS = "loop", "chips"
_numbers = itertools.count()


@dataclass(frozen=True)
class Axis:
    """An axis in front of a marked value's own: the steps of a loop, or the chips. `number` is that of the loop or part."""

    kind: str
    size: int
    number: int = field(default_factory=lambda: next(_numbers))


@dataclass(frozen=True)
class Place:
    """Where a marked value stood: the axes in front of its own, outermost first."""

    tag: Tag
    axes: tuple[Axis, ...] = ()

    def within(self, axis: Axis) -> "Place":
        return Place(self.tag, (axis, *self.axes))


@dataclass
class Harvest:
    """Of one evaluation of a program.

    Attributes:
        outputs: its own.
        places, values: what was marked, in order.
        lost: tags of what no output can be.
    """

    outputs: list = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    values: list = field(default_factory=list)
    lost: list[Tag] = field(default_factory=list)

    def take(self, other: "Harvest", axis: Axis | None = None):
        """What was marked in a part of the program."""
        self.places += [place if axis is None else place.within(axis) for place in other.places]
        self.values += other.values
        self.lost += other.lost


def harvest(program: ClosedJaxpr, arguments: Sequence) -> Harvest:
    """The program's outputs and marked values for these flat arguments; no mark is left in what is traced meanwhile.

    Raises NotImplementedError for a mark inside of an operation that cannot be taken apart.
    """
    return _evaluate(program.jaxpr, program.consts, arguments)


def _evaluate(jaxpr: Jaxpr, consts: Sequence, arguments: Sequence) -> Harvest:
    found, known = Harvest(), {}
    known.update(zip(jaxpr.constvars, consts))
    known.update(zip(jaxpr.invars, arguments))

    def read(variable):
        return variable.val if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        values = [read(v) for v in equation.invars]
        if equation.primitive is capture_p:
            found.places.append(Place(equation.params["tag"]))
            found.values += values
            continue
        with equation.ctx.manager:
            if any(isinstance(effect, Marked) for effect in equation.effects):
                outputs = _part(equation, values, found)
            else:
                outputs = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
        known.update(zip(equation.outvars, outputs if equation.primitive.multiple_results else [outputs]))
    found.outputs = [read(v) for v in jaxpr.outvars]
    return found


def _part(equation, values: list, found: Harvest) -> list:
    """Outputs of an operation that has marks inside of it."""
    name, params = equation.primitive.name, equation.params
    if name in INLINED:
        inner = params[INLINED[name]]
        part = (
            _evaluate(inner.jaxpr, inner.consts, values)
            if isinstance(inner, ClosedJaxpr)
            else _evaluate(inner, (), values)
        )
        found.take(part)
        return part.outputs
    if name not in PARTS:
        raise NotImplementedError(
            f"expected submodules to be called in loops, branches and parts of chips, got one in {name}: compare a form that"
            " has none there"
        )
    return PARTS[name](params, values, found)


def _scan(params: dict, values: list, found: Harvest) -> list:
    body, (consts, carried), inside = params["jaxpr"], (params["num_consts"], params["num_carry"]), []

    def step(carry, xs):
        part = _evaluate(body.jaxpr, body.consts, [*values[:consts], *carry, *xs])
        inside.append(part)
        return part.outputs[:carried], (part.outputs[carried:], part.values)

    carry, (outs, marked) = lax.scan(
        step,
        values[consts : consts + carried],
        values[consts + carried :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    found.take(Harvest(places=inside[-1].places, values=marked, lost=inside[-1].lost), Axis(LOOP, params["length"]))
    return [*carry, *outs]


def _by_chip(params: dict, values: list, found: Harvest) -> list:
    body, axes, inside = (
        params["jaxpr"],
        tuple(sorted(params["newly_manual_axes"], key=params["mesh"].axis_names.index)),
        [],
    )

    def local(*values):
        part = _evaluate(body, (), values)
        inside.append(part)
        return part.outputs, [value[None] for value in part.values]

    outs, marked = jax.shard_map(
        local,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )(*values)
    found.take(
        Harvest(places=inside[-1].places, values=marked, lost=inside[-1].lost), Axis(CHIPS, params["mesh"].size)
    )
    return outs


def _branches(params: dict, values: list, found: Harvest) -> list:
    def branch(inner: ClosedJaxpr) -> Callable:
        def run(*values):
            part = _evaluate(inner.jaxpr, inner.consts, values)
            found.lost += [*(place.tag for place in part.places), *part.lost]
            return part.outputs

        return run

    return lax.switch(values[0], [branch(inner) for inner in params["branches"]], *values[1:])


def _while(params: dict, values: list, found: Harvest) -> list:
    ours, theirs = params["cond_nconsts"], params["body_nconsts"]
    before, inside, carry = values[:ours], values[ours : ours + theirs], values[ours + theirs :]

    def run(inner: ClosedJaxpr, arguments: list) -> list:
        part = _evaluate(inner.jaxpr, inner.consts, arguments)
        found.lost += [*(place.tag for place in part.places), *part.lost]
        return part.outputs

    return lax.while_loop(
        lambda carry: run(params["cond_jaxpr"], [*before, *carry])[0],
        lambda carry: run(params["body_jaxpr"], [*inside, *carry]),
        carry,
    )


PARTS: dict[str, Callable[[dict, list, Harvest], list]] = {
    "scan": _scan,
    "shard_map": _by_chip,
    "cond": _branches,
    "while": _while,
}
