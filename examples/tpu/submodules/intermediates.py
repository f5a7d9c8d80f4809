"""Marked values as outputs of their program: the values that `marks.capture` marked become further outputs.

The trace is evaluated operation by operation. Marked values in a `scan` are stacked, [steps, ...]; those in a `shard_map` are stacked by
chip, [chips, ...]. Those in a branch or a `while` loop cannot be outputs; they are `lost`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import PartitionSpec

from .marks import Marked, Tag, capture_p


INLINED = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


@dataclass(frozen=True, eq=False)
class Axis:
    """A leading axis of a stacked value: the steps of one loop, or the chips."""

    size: int
    of_chips: bool = False


@dataclass(frozen=True)
class Place:
    """A marked value's tag and its leading axes, outermost first."""

    tag: Tag
    axes: tuple[Axis, ...] = ()


@dataclass
class Intermediates:
    """One evaluation of a program: its outputs, the places and values of marked values, and the tags of those that are lost."""

    outputs: list = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    values: list = field(default_factory=list)
    lost: list[Tag] = field(default_factory=list)

    def take(self, part: "Intermediates", values: list, *axes: Axis):
        """Adds what was marked in a part of the program; `values` are the part's marked values with these leading axes."""
        self.places += [replace(place, axes=(*axes, *place.axes)) for place in part.places]
        self.values += values
        self.lost += part.lost


def with_intermediates(program: ClosedJaxpr | Jaxpr, arguments: Sequence) -> Intermediates:
    """Returns the program's outputs and marked values for these flat arguments; a trace of this function has no marks.

    Raises:
        NotImplementedError: a mark inside of an operation that is not among `PARTS`.
    """
    found, known, jaxpr = Intermediates(), {}, getattr(program, "jaxpr", program)
    known.update(zip(jaxpr.constvars, getattr(program, "consts", ())))
    known.update(zip(jaxpr.invars, arguments))

    def read(variable):
        return variable.val if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        values, primitive = [read(v) for v in equation.invars], equation.primitive
        if primitive is capture_p:
            found.places.append(Place(equation.params["tag"]))
            found.values += values
            continue
        with equation.ctx.manager:
            if not any(isinstance(effect, Marked) for effect in equation.effects):
                outputs = primitive.bind(*values, **primitive.get_bind_params(equation.params))
            elif primitive.name in PARTS:
                outputs = PARTS[primitive.name](equation.params, values, found)
            else:
                raise NotImplementedError(
                    f"expected submodules in loops, branches or shards, got one in {primitive.name}: compare another form"
                )
        known.update(zip(equation.outvars, outputs if primitive.multiple_results else [outputs]))
    found.outputs = [read(v) for v in jaxpr.outvars]
    return found


# Outputs of an operation that has marks inside of it


def _inlined(params: dict, values: list, found: Intermediates) -> list:
    part = with_intermediates(params.get("jaxpr") or params["call_jaxpr"], values)
    found.take(part, part.values)
    return part.outputs


def _scan(params: dict, values: list, found: Intermediates) -> list:
    consts, carried, inside = params["num_consts"], params["num_carry"], []

    def step(carry, xs):
        part = with_intermediates(params["jaxpr"], [*values[:consts], *carry, *xs])
        inside.append(part)
        return part.outputs[:carried], (part.outputs[carried:], part.values)

    xs = values[consts + carried :]
    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (outs, marked) = lax.scan(step, values[consts : consts + carried], xs, **how)
    found.take(inside[-1], marked, Axis(params["length"]))
    return [*carry, *outs]


def _by_chip(params: dict, values: list, found: Intermediates) -> list:
    mesh, inside = params["mesh"], []
    axes = tuple(sorted(params["newly_manual_axes"], key=mesh.axis_names.index))

    def local(*values):
        part = with_intermediates(params["jaxpr"], values)
        inside.append(part)
        return part.outputs, [value[None] for value in part.values]

    outs, marked = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )(*values)
    found.take(inside[-1], marked, Axis(mesh.size, of_chips=True))
    return outs


def _unseen(program: ClosedJaxpr, found: Intermediates) -> Callable:
    """Returns the program as a function; values marked in it are lost."""

    def run(*values):
        part = with_intermediates(program, values)
        found.lost += [*(place.tag for place in part.places), *part.lost]
        return part.outputs

    return run


def _branches(params: dict, values: list, found: Intermediates) -> list:
    return lax.switch(values[0], [_unseen(branch, found) for branch in params["branches"]], *values[1:])


def _while(params: dict, values: list, found: Intermediates) -> list:
    goes_on, body = (_unseen(params[name], found) for name in ("cond_jaxpr", "body_jaxpr"))
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    asked, used, carry = values[: split[0]], values[split[0] : split[1]], values[split[1] :]
    return lax.while_loop(lambda carry: goes_on(*asked, *carry)[0], lambda carry: body(*used, *carry), carry)


PARTS: dict[str, Callable[[dict, list, Intermediates], list]] = {
    **dict.fromkeys(INLINED, _inlined),
    "scan": _scan,
    "shard_map": _by_chip,
    "cond": _branches,
    "while": _while,
}
