"""Marks of submodules' inputs and outputs in a traced program, made by `capture`.

A mark is an operation without results that no pass removes, also in a scanned block. A program with marks cannot be compiled:
`intermediates` turns each mark into an output. Only a trace inside of `capturing` has marks.
"""

import contextlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch
from jax._src import effects  # marks must outlive dead code, and JAX has no public name for what does
from jax.extend.core import Primitive
from jax.interpreters import batching
from torch.utils._pytree import tree_leaves

from diffusers.tpu.bridge import Deferred, Tensor
from diffusers.tpu.compile.tracing.blocks import scanned
from diffusers.tpu.compile.tracing.functional import Method
from diffusers.tpu.compile.tracing.scan import Group
from diffusers.tpu.compile.tracing.scopes import watching


@dataclass(frozen=True)
class Tag:
    """Identifies a marked value of the submodule `name` of upstream's model; the model's own name is empty.

    Attributes:
        given: whether it is of the module's output, else of its arguments.
        leaf: its number among the floating tensors of the arguments or of the output.
        call: number of the call in the trace.
        blocks: range (start, stop) of the blocks that are scanned as one; None outside of a scan.
    """

    name: str
    given: bool
    leaf: int
    call: int
    blocks: tuple[int, int] | None = None


class Marked(effects.Effect):
    """The effect that keeps a mark from being removed."""


_MARKED = Marked()
capture_p = Primitive("capture")
capture_p.multiple_results = True
capture_p.def_effectful_abstract_eval(lambda value, tag: ([], {_MARKED}))
for _allowed in ("control_flow", "custom_derivatives", "remat"):
    getattr(effects, f"{_allowed}_allowed_effects").add_type(Marked)


def _batched(args: tuple, axes: tuple, *, tag: Tag):
    (value,), (axis,) = args, axes
    return capture_p.bind(value if axis is batching.not_mapped else jnp.moveaxis(value, axis, 0), tag=tag), []


batching.primitive_batchers[capture_p] = _batched


def capture(value: jax.Array, tag: Tag):
    """Marks a floating value of the open trace; others are not marked."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        capture_p.bind(value, tag=tag)


def capturing(model: torch.nn.Module, groups: list[Group]) -> contextlib.AbstractContextManager:
    """A context in which traces mark the inputs and outputs of the model's submodules."""
    names = {id(module): name for name, module in model.named_modules()}
    deferring = {f"{g.path}.{index}" for g in groups for index in range(g.start, g.stop)}

    def name_of(module) -> str | None:
        if isinstance(module, Method):  # a block inside of its scan, or the model
            return names.get(id(module.module))
        name = names.get(id(module))
        return None if name in deferring else name

    def seen(name: str, call: int, arguments: tuple, output):
        for given, values in ((False, arguments), (True, output)):
            for number, array in enumerate(_arrays(values)):
                if array is not None:
                    capture(array, Tag(name, given, number, call, scanned.get()))

    return watching(name_of, seen)


def _arrays(values) -> list[jax.Array | None]:
    """Returns arrays of the floating tensors; None for a deferred one, since reading it would end a scan of blocks."""
    tensors = (t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point())
    return [t.jax() if isinstance(t, Tensor) and not (isinstance(t, Deferred) and t.waits) else None for t in tensors]
