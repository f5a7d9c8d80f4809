"""Which results of its layers each scanned block keeps for the backward pass: those that take longer to compute again than to keep,
the most expensive first, as many as a chip has room for."""

import math
from collections.abc import Callable

import jax
import jax.extend

from ...kernels.kept import ATTENTION, is_worth_its_room, worth
from ...kernels.settings import Settings


WITHIN = 4  # memory of a block's backward pass, in sizes of its layers' results: they and gradients, in float32


def kept_by_blocks(
    step: Callable, carry: list, of_block, blocks: int, settings: Settings, room: float
) -> tuple[Callable, float]:
    """JAX's policy for `jax.checkpoint`, and how much of the room it takes.

    Args:
        step: (carry, of_block) -> (carry, more) of one block. `blocks`: how many there are.
        room: bytes of a chip.
    """
    if math.isinf(room):
        return jax.checkpoint_policies.save_any_names_but_these(), 0.0
    run = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(step)(carry, of_block))
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves((carry, of_block))]
    carried, others = given[: len(carry)], given[len(carry) :]
    axes = ("dp", "sp") if settings.sequence else ("dp",)
    chips = 1 if settings.mesh is None else math.prod(settings.mesh.shape[axis] for axis in axes)
    named: list[tuple[str, int]] = []

    def bytes_of(names: set[str]) -> float:
        named.clear()

        def policy(primitive, *found, **parameters):
            if primitive.name != "name":
                return False
            named.append((parameters["name"], sum(map(_nbytes, found))))
            return parameters["name"] in names

        def back(carried, others):
            block = jax.checkpoint(lambda *x: run(*x, *others)[: len(carry)], policy=policy)
            return jax.tree.leaves(jax.vjp(block, *carried)[1])

        return sum(map(_nbytes, jax.eval_shape(back, carried, others))) / chips

    nothing, always = bytes_of(set()), bytes_of({ATTENTION})
    layers = [(name, nbytes) for name, nbytes in named if name != ATTENTION]
    room -= WITHIN * sum(nbytes for _, nbytes in layers) / chips
    room -= blocks * (always - nothing + sum(map(_nbytes, carried)) / chips)
    names, taken = {ATTENTION}, 0.0
    dear = {name for name, _ in layers if is_worth_its_room(worth(name), settings.generation)}
    for name in sorted(dear, key=lambda name: (-worth(name), name)):
        more = blocks * (bytes_of({*names, name}) - always) - taken
        if taken + more <= room:
            names, taken = {*names, name}, taken + more
    return jax.checkpoint_policies.save_only_these_names(*names), taken


def _nbytes(x) -> int:
    return x.size * x.dtype.itemsize
