"""What submodules take and give while a module is traced, as marks in its program: `capture` says that a value is one of them.

A mark is an operation without results that no pass removes, in a scanned block too. A program with marks is not compiled
as it is: `intermediates` makes each an output of the program. Without `capturing` around a trace there are none.
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
    """Of which value a mark is: of the module `name` in upstream's model, empty for the model itself.

    Attributes:
        given: whether the module gave it, else it was an argument.
        leaf: its number among the floating tensors of the call, or of its output.
        call: the calls of one trace in order.
        blocks: first of the blocks for all of which one was traced, and behind the last; None: not in a scanned block.
    """

    name: str
    given: bool
    leaf: int
    call: int
    blocks: tuple[int, int] | None = None


class Marked(effects.Effect):
    """What keeps a mark in its program."""


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
    """Mark a value of the trace that is open, if it is of floating numbers."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        capture_p.bind(value, tag=tag)


def capturing(model: torch.nn.Module, groups: list[Group]) -> contextlib.AbstractContextManager:
    """While this is open, what the model's submodules take and give in a trace is marked."""
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
    """Of the floating tensors among the leaves; None for one whose value waits: to ask for it would end a run of blocks."""
    tensors = (t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point())
    return [t.jax() if isinstance(t, Tensor) and not (isinstance(t, Deferred) and t.waits) else None for t in tensors]
