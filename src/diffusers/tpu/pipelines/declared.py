"""Plans from what upstream's classes declare for other hardware: theirs are the splits, where they lie is ours.

    _cp_plan    {path of a module: {argument: split along an axis}}    tokens of what blocks hand on, over `sp`
    _tp_plan    {glob of a linear layer: by columns, by rows}          its outputs or its inputs, over `tp`

What cannot be said so is left to the compiler: an argument that no repeated block takes, or one that is split in two ways.
Values never depend on a plan.
"""

import fnmatch
import inspect
import re

import torch
from jax.sharding import PartitionSpec as P

from ...hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from ...models._modeling_parallel import ContextParallelInput
from ..chips.sharding import STORAGE_AXES, ModelPlan, Rules


# Of a linear layer's weight [out, in] and bias. Several projections in one weight are cut as one: the compiler moves what
# chips need of each where they are taken apart.
STYLES = {
    "colwise": {"weight": P("tp", STORAGE_AXES), "bias": P("tp")},
    "rowwise": {"weight": P(STORAGE_AXES, "tp")},
}
PACKED = {PackedColwiseParallel: "colwise", PackedRowwiseParallel: "rowwise"}


def declared_plan(module: torch.nn.Module) -> ModelPlan:
    """What the module's class declares of how chips share its work, and nothing where it declares nothing."""
    return ModelPlan(rules=declared_rules(module), carry=declared_carry(module))


def declared_carry(module: torch.nn.Module) -> dict[str, P] | None:
    """Arguments of repeated blocks that are declared split, by name; None where there is none.

    An argument of the model is a block's of the same name, and so is one of a block's part: [B, T, C] is split in both.
    """
    taken, found = _arguments_of_blocks(module), {}
    for inputs in (getattr(module, "_cp_plan", None) or {}).values():
        for name, split in inputs.items() if isinstance(inputs, dict) else ():
            if name in taken and isinstance(split, ContextParallelInput) and split.expected_dims is not None:
                found.setdefault(name, set()).add(_split(split.split_dim, split.expected_dims))
    return {name: specs.pop() for name, specs in found.items() if len(specs) == 1} or None


def declared_rules(module: torch.nn.Module) -> Rules:
    """A rule for each kind of weight that is declared split over `tp`; only of weights that the module has."""
    declared = getattr(module, "_tp_plan", None) or {}
    names = {name for name, _ in module.named_parameters()}
    rules = []
    for style, specs in STYLES.items():
        globs = [glob for glob, what in declared.items() if PACKED.get(type(what), what) == style]
        for kind, spec in specs.items():
            there = [glob for glob in globs if fnmatch.filter(names, f"{glob}.{kind}")]
            if there:
                # Of a run of blocks a weight's name has `*` or a range in the place of the number.
                either = "|".join(re.escape(glob).replace(r"\*", r"[^.]+") for glob in there)
                rules.append((rf"^({either})\.{kind}$", spec))
    return tuple(rules)


def _arguments_of_blocks(module: torch.nn.Module) -> set[str]:
    repeated = {*(getattr(module, "_repeated_blocks", None) or getattr(module, "_no_split_modules", None) or ())}
    blocks = {type(block) for block in module.modules() if type(block).__name__ in repeated}
    return {name for block in blocks for name in inspect.signature(block.forward).parameters}


def _split(dim: int, axes: int) -> P:
    """The batch, which comes first where it is not what is split, over `dp`."""
    return P(*("sp" if axis == dim else "dp" if axis == 0 else None for axis in range(axes)))
