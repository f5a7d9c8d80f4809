"""The forms in which a component runs, and the inputs and outputs of its submodules in each: `run_form`.

"upstream" is upstream's module on the host; "torchax" the same module traced block by block; "scanned" the same with equal blocks as one
scan, as a pipeline on the TPU path runs it; "nnx" the module in plain JAX (`plans.flax_class`), where there is one. A traced form is the
program that a run compiles, with inputs and outputs of submodules as further outputs (`intermediates`).
"""

import copy
import dataclasses
import functools
from collections import defaultdict
from dataclasses import dataclass, field

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from diffusers.tpu.bridge import as_numpy
from diffusers.tpu.chips.devices import compile_lowered
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.common.config import TPUConfig
from diffusers.tpu.compare.pipelines import NARROW, Call
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.compile.tracing.scan import Group
from diffusers.tpu.compile.tracing.scopes import watching
from diffusers.tpu.pipelines.attach import target_devices
from diffusers.tpu.pipelines.plans import FLAX, module_plan
from diffusers.tpu.planner.building import cast_module

from .intermediates import Axis, Intermediates, Place, with_intermediates
from .marks import capturing
from .nnx import trace_nnx


KINDS = ("upstream", "torchax", "scanned", "nnx")


@dataclass(frozen=True)
class Form:
    """One way to run a component. `mesh` and `attention` are those of `TPUConfig`.

    Raises:
        ValueError: a kind that is not among `KINDS`, or a mesh or attention for a kind that takes none.
    """

    kind: str
    dtype: torch.dtype = torch.float32
    mesh: tuple[int, int, int] = (1, 1, 1)
    attention: str = "auto"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"expected a form among {', '.join(KINDS)}, got {self.kind!r}")
        if self.kind == "upstream" and self.mesh != (1, 1, 1):
            raise ValueError(f"expected no mesh of upstream's own form, which runs on the host, got {self.mesh}")
        if self.kind in ("upstream", "nnx") and self.attention != "auto":
            raise ValueError(
                f"expected no attention of the form {self.kind}, got {self.attention}: torchax and scanned take one"
            )

    def __str__(self):
        words = [self.kind, str(self.dtype).removeprefix("torch.")]
        if self.kind != "upstream":
            words.append(f"mesh {','.join(map(str, self.mesh))}")
            words += [] if self.attention == "auto" else [f"attention {self.attention}"]
        return " ".join(words)


@dataclass(frozen=True)
class Value:
    """One input or output tensor of a submodule."""

    array: np.ndarray  # of float32 or wider
    by_chip: bool = False  # a part for each chip: [chips, ...]
    spec: str = ""  # its sharding in the program
    chips: int = 0  # how many hold it; 0 for upstream's


@dataclass
class ModuleCall:
    """One call of a submodule: floating tensors of its arguments and of its output, by number."""

    name: str
    given: dict[int, Value] = field(default_factory=dict)
    answered: dict[int, Value] = field(default_factory=dict)


@dataclass
class Captured:
    """Every call of every submodule of a component; the component's own name is empty."""

    calls: list[ModuleCall]  # in the order in which upstream's return, or a program's begin
    lost: set[str]  # names of submodules called in branches or `while` loops, whose values cannot be outputs
    module: torch.nn.Module  # the component

    @functools.cached_property
    def by_name(self) -> dict[str, list[ModuleCall]]:
        """The calls by submodule."""
        found = defaultdict(list)
        for call in self.calls:
            found[call.name].append(call)
        return dict(found)


def run_form(module: torch.nn.Module, form: Form, call: Call) -> Captured:
    """Returns inputs and outputs of every submodule in a call of `module`, which is not changed.

    Args:
        module: upstream's module with its weights, not on the TPU path.
        call: of one of its entries, as in a pipeline of the form's dtype; for float32, narrower tensors are widened.

    Raises:
        ValueError: a component that does not have this form.
        NotImplementedError: the call cannot be traced.
        RuntimeError: the TPU path is off.
    """
    kinds, name = KINDS if type(module).__name__ in FLAX else KINDS[:-1], type(module).__name__
    if form.kind not in kinds:
        raise ValueError(
            f"expected a form of {name} ({', '.join(kinds)}), got {form.kind}: in plain JAX there are {', '.join(FLAX)}"
        )
    exact = form.dtype == torch.float32
    if not exact or any(p.dtype in NARROW for p in module.parameters()):
        module = cast_module(copy.deepcopy(module), form.dtype)
    call = call.copied(widen=exact)
    with torch.inference_mode(False), torch.no_grad():
        if form.kind == "upstream":
            return _run_upstream(module, call)
        if form.kind == "nnx":
            program, arguments = trace_nnx(module, form.dtype, make_mesh(target_devices(), form.mesh), call)
            return _sorted_out(_computed(program, arguments, None), [], module)
        return _run_traced(module, form, call)


def _run_upstream(module: torch.nn.Module, call: Call) -> Captured:
    names, calls = {id(m): name for name, m in module.named_modules()}, []

    def seen(name: str, number: int, given: tuple, output):
        calls.append(ModuleCall(name, _host_values(given), _host_values(output)))

    given = _host_values((call.args, call.kwargs))
    with watching(lambda m: names.get(id(m)), seen):
        output = getattr(module, call.entry)(*call.args, **call.kwargs)
    return Captured([*calls, ModuleCall("", given, _host_values(output))], set(), module)


def _host_values(values) -> dict[int, Value]:
    tensors = (t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point())
    return {n: Value(_wide(as_numpy(t.detach()).copy())) for n, t in enumerate(tensors)}


def _wide(array: np.ndarray) -> np.ndarray:
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _run_traced(module: torch.nn.Module, form: Form, call: Call) -> Captured:
    config = TPUConfig(mesh=form.mesh, attention=form.attention, scan=form.kind == "scanned")
    runner = CompiledModule(module, module_plan(module), make_mesh(target_devices(), form.mesh), config)
    runner.executables.off = True  # a kept program has no values of submodules
    runner.attach()
    try:
        taken = runner.flatten_call(call.entry, call.args, call.kwargs)
        groups = runner.current().groups
        with capturing(module, groups):
            program = runner.find_program(taken)
        if program is None:
            raise NotImplementedError(
                f"expected a call that a program can stand for, got {type(module).__name__}.{call.entry}, which runs"
                f" operation by operation: {'; '.join(runner.eager)}. `diffusers-tpu compare --trace MODEL` lists what stops it"
            )
        runner.take_values(taken)
        values = taken.values
        arguments = jax.tree.leaves((values.weights, values.numbers, [values.inputs]))
        found = _computed(program.traced.jaxpr, arguments, runner.compiler_options)
    finally:
        runner.detach()
    return _sorted_out(found, groups, module)


def _computed(program, arguments: list, options: dict | None) -> Intermediates:
    """Compiles and runs a traced program; returns its outputs and marked values."""
    kept = []

    def run(*arguments):
        kept.append(with_intermediates(program, arguments))
        return kept[-1].outputs, kept[-1].values

    _, values = compile_lowered(jax.jit(run).lower(*arguments), options)(*arguments)
    return dataclasses.replace(kept[-1], values=values)


def _sorted_out(found: Intermediates, groups: list[Group], module: torch.nn.Module) -> Captured:
    """Splits stacked values of loops: a scanned block's by the block's number, others into consecutive calls."""
    first = {}
    for place in found.places:
        for axis in place.axes:
            first[axis] = min(first.get(axis, place.tag.call), place.tag.call)
    calls: dict[tuple, ModuleCall] = {}
    for place, value in zip(found.places, found.values):
        loops = [axis for axis in place.axes if not axis.of_chips]
        by_chip, chips = len(loops) < len(place.axes), len(value.sharding.device_set)
        spec = "a part a chip" if by_chip else _spec(value, len(loops))
        array = _wide(np.asarray(value))
        if by_chip:
            array = np.moveaxis(array, [axis.of_chips for axis in place.axes].index(True), len(loops))
        for steps in np.ndindex(*(axis.size for axis in loops)):
            name = _name(place, steps, loops, groups)
            order = *((first[axis], step) for axis, step in zip(loops, steps)), (place.tag.call, -1)
            made = calls.setdefault((order, name), ModuleCall(name))
            values = made.answered if place.tag.given else made.given
            values[place.tag.leaf] = Value(array[steps], by_chip, spec, chips)
    return Captured([calls[key] for key in sorted(calls)], {tag.name for tag in found.lost}, module)


def _name(place: Place, steps: tuple, loops: list[Axis], groups: list[Group]) -> str:
    """Returns the submodule's name, with the block's number where it is in a scanned block."""
    tag = place.tag
    if tag.blocks is None:
        return tag.name
    start, stop = tag.blocks
    step = next(step for step, axis in zip(steps[::-1], loops[::-1]) if axis.size == stop - start)
    prefix = next(f"{group.path}." for group in groups if f"{tag.name}.".startswith(f"{group.path}.{start}."))
    return f"{prefix}{start + step}{tag.name.removeprefix(f'{prefix}{start}')}"


def _spec(value: jax.Array, stacked: int) -> str:
    """Returns the value's PartitionSpec in words, without its first `stacked` axes."""
    spec = getattr(value.sharding, "spec", None)
    if spec is None:
        return str(value.sharding)
    axes = (*spec, *(None,) * value.ndim)[stacked : value.ndim]
    return f"P({', '.join('-' if x is None else x if isinstance(x, str) else '+'.join(x) for x in axes)})"
