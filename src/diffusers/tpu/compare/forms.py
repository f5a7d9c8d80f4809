"""The forms that a component runs in, and what its submodules take and give in each: `run_form`.

    upstream    its own module, on the host
    torchax     its module traced, block by block
    scanned     the same, equal blocks as one scanned block: what a pipeline on the TPU path runs
    nnx         in plain JAX, of the classes that `plans.flax_class` has it of

A traced form is the program that a run compiles, what its submodules take and give beside its outputs (`harvest`).
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from ..bridge import as_numpy
from ..chips.devices import compile_lowered
from ..chips.mesh import make_mesh
from ..compile.module import CompiledModule
from ..compile.tracing import Tag, capture, capturing
from ..compile.tracing.scan import Group
from ..config import TPUConfig
from ..pipelines.attach import target_devices
from ..pipelines.plans import FLAX, flax_class, module_plan
from .harvest import CHIPS, Harvest, Place, harvest
from .pipelines import Call, cast_module, widened


KINDS = ("upstream", "torchax", "scanned", "nnx")
NNX_ENTRIES = ("encode", "decode")


@dataclass(frozen=True)
class Form:
    """One way to run a component. `mesh` and `attention` are as of `TPUConfig`.

    Raises ValueError for a kind that is none of `KINDS`, or that has no mesh, or no attention to choose.
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
                f"expected no attention of the form {self.kind}, which has its own, got {self.attention}: torchax and scanned"
                " take one"
            )

    def __str__(self):
        words = [self.kind, str(self.dtype).removeprefix("torch.")]
        if self.kind != "upstream":
            words.append(f"mesh {','.join(map(str, self.mesh))}")
            words += [] if self.attention == "auto" else [f"attention {self.attention}"]
        return " ".join(words)


@dataclass(frozen=True)
class Value:
    """One tensor that a submodule took or gave.

    Attributes:
        array: of float32 or wider; of a value that each chip computed for itself [chips, ...].
        by_chip: whether it is such a value.
        spec, chips: how it lay in the program, and on how many chips; upstream's on none.
    """

    array: np.ndarray
    by_chip: bool = False
    spec: str = ""
    chips: int = 0


@dataclass
class ModuleCall:
    """One call of a submodule: its floating tensors, by their number among the call's and the answer's."""

    name: str
    given: dict[int, Value] = field(default_factory=dict)
    answered: dict[int, Value] = field(default_factory=dict)


@dataclass
class Captured:
    """Every call of every submodule; the component itself has no name.

    Attributes:
        calls: upstream's in the order in which they ended, a program's in that of their calls.
        lost: names of those that were called where no output of the program can come from.
        kinds: class of each by name.
        weighted: names of those that have parameters of their own.
    """

    calls: list[ModuleCall]
    lost: list[str]
    kinds: dict[str, str]
    weighted: set[str]

    @functools.cached_property
    def by_name(self) -> dict[str, list[ModuleCall]]:
        """The calls of each submodule."""
        found = defaultdict(list)
        for call in self.calls:
            found[call.name].append(call)
        return dict(found)


def forms_of(module: torch.nn.Module) -> tuple[str, ...]:
    """The kinds of form that a component of this class has."""
    return KINDS if type(module).__name__ in FLAX else KINDS[:-1]


def run_form(module: torch.nn.Module, form: Form, call: Call) -> Captured:
    """What every submodule takes and gives in a call of `module`, which is left as it is.

    Args:
        module: upstream's, with the weights to run with, not on the TPU path.
        call: of one of its entries, as a pipeline of the form's dtype makes it; for float32 what is narrower is widened.

    Raises:
        ValueError: a component that does not have this form.
        NotImplementedError: no program stands for the call.
        RuntimeError: the TPU path is off.
    """
    if form.kind not in forms_of(module):
        raise ValueError(
            f"expected a form of {type(module).__name__} ({', '.join(forms_of(module))}), got {form.kind}: in plain JAX there"
            f" are {', '.join(FLAX)}"
        )
    if form.dtype != torch.float32 or any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters()):
        module = cast_module(copy.deepcopy(module), form.dtype)
    call = dataclasses.replace(call, **_in_dtype(call, form.dtype))
    with torch.inference_mode(False), torch.no_grad():
        if form.kind == "upstream":
            return _run_upstream(module, call)
        return _run_nnx(module, form, call) if form.kind == "nnx" else _run_traced(module, form, call)


def _in_dtype(call: Call, dtype: torch.dtype) -> dict:
    """Arguments of their own: for float32 narrower values are widened; for others they are what they were recorded as."""
    given = tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
    if dtype == torch.float32:
        given = tree_map_only(torch.Tensor, widened, given)
    return dict(zip(("args", "kwargs"), given))


# Upstream's own


def _run_upstream(module: torch.nn.Module, call: Call) -> Captured:
    names = {id(m): name for name, m in module.named_modules()}
    calls, open_calls = [], []

    def enter(m, args):
        if id(m) in names:
            open_calls.append(ModuleCall(names[id(m)]))

    def leave(m, args, kwargs, output):
        if id(m) in names:
            made = open_calls.pop()
            made.given, made.answered = _host_values((args, kwargs)), _host_values(output)
            calls.append(made)

    with contextlib.ExitStack() as stack:
        stack.callback(register_module_forward_hook(leave, with_kwargs=True).remove)
        stack.callback(register_module_forward_pre_hook(enter).remove)
        given = _host_values((call.args, call.kwargs))
        output = getattr(module, call.entry)(*call.args, **call.kwargs)
    calls.append(ModuleCall("", given, _host_values(output)))
    return Captured(calls, [], *_facts(module))


def _host_values(values) -> dict[int, Value]:
    tensors = (t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point())
    return {n: Value(_wide(as_numpy(t.detach()).copy())) for n, t in enumerate(tensors)}


def _facts(module: torch.nn.Module) -> tuple[dict[str, str], set[str]]:
    """Class by name, and names of submodules that have parameters of their own."""
    kinds = {name: type(m).__name__ for name, m in module.named_modules()}
    return kinds, {name for name, m in module.named_modules() if m._parameters}


def _wide(array: np.ndarray) -> np.ndarray:
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


# Programs


def _run_traced(module: torch.nn.Module, form: Form, call: Call) -> Captured:
    mesh = make_mesh(target_devices(), form.mesh)
    config = TPUConfig(mesh=form.mesh, attention=form.attention, scan=form.kind == "scanned")
    runner = CompiledModule(module, module_plan(module), mesh, config)
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


def _computed(program, arguments: list, options: dict | None) -> Harvest:
    """The harvest of a traced program, its values computed."""
    kept = []

    def run(*arguments):
        kept.append(harvest(program, arguments))
        return kept[-1].outputs, kept[-1].values

    outputs, values = compile_lowered(jax.jit(run).lower(*arguments), options)(*arguments)
    return dataclasses.replace(kept[-1], outputs=outputs, values=values)


def _sorted_out(found: Harvest, groups: list[Group], module: torch.nn.Module) -> Captured:
    """Each value of a loop by itself: a scanned block's by the block's number, any other's as one call after another."""
    first = {}
    for place in found.places:
        for axis in place.axes:
            first[axis.number] = min(first.get(axis.number, place.tag.call), place.tag.call)
    calls: dict[tuple, ModuleCall] = {}
    for place, value in zip(found.places, found.values):
        loops = [axis for axis in place.axes if axis.kind != CHIPS]
        by_chip, chips = len(loops) < len(place.axes), len(value.sharding.device_set)
        spec = "a part a chip" if by_chip else _spec(value, len(loops))
        array = _wide(np.asarray(value))
        if by_chip:
            array = np.moveaxis(array, place.axes.index(next(a for a in place.axes if a.kind == CHIPS)), len(loops))
        for steps in np.ndindex(*(axis.size for axis in loops)):
            name = _name(place, steps, loops, groups)
            order = *((first[axis.number], step) for axis, step in zip(loops, steps)), (place.tag.call, -1)
            made = calls.setdefault((order, name), ModuleCall(name))
            values = made.answered if place.tag.given else made.given
            values[place.tag.leaf] = Value(array[steps], by_chip, spec, chips)
    lost = sorted({tag.name for tag in found.lost})
    return Captured([calls[key] for key in sorted(calls)], lost, *_facts(module))


def _name(place: Place, steps: tuple, loops: list, groups: list[Group]) -> str:
    """The name of the submodule, of a scanned block with that block's number."""
    tag = place.tag
    if tag.blocks is None:
        return tag.name
    start, stop = tag.blocks
    step = next(step for step, axis in zip(steps[::-1], loops[::-1]) if axis.size == stop - start)
    prefix = next(f"{group.path}." for group in groups if f"{tag.name}.".startswith(f"{group.path}.{start}."))
    return f"{prefix}{start + step}{tag.name.removeprefix(f'{prefix}{start}')}"


def _spec(value: jax.Array, stacked: int) -> str:
    """How a value of the program lies on its chips, of the axes behind those that were put in front of it."""
    spec = getattr(value.sharding, "spec", None)
    return (
        str(value.sharding)
        if spec is None
        else f"P({', '.join(map(_axis, (*spec, *(None,) * value.ndim)[stacked : value.ndim]))})"
    )


def _axis(names) -> str:
    return "-" if names is None else names if isinstance(names, str) else "+".join(names)


# Plain JAX


def _run_nnx(module: torch.nn.Module, form: Form, call: Call) -> Captured:
    from flax import nnx

    if call.entry not in NNX_ENTRIES:
        raise ValueError(
            f"expected an entry that the form in plain JAX has ({', '.join(NNX_ENTRIES)}), got {call.entry}"
        )
    cls = flax_class(type(module).__name__)
    vae = cls.from_torch(
        module, dtype=str(form.dtype).removeprefix("torch."), mesh=make_mesh(target_devices(), form.mesh)
    )
    for name in vars(vae):
        if name == "use_tiling" or name.startswith("tile_sample_"):
            setattr(vae, name, getattr(module, name, getattr(vae, name)))
    (x,) = (t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor))
    x = jnp.asarray(np.moveaxis(as_numpy(x), 1, -1), vae.dtype)
    state, run = vae.traceable(call.entry)
    with _marking(nnx, type(vae), f"_{call.entry}", module):
        program = jax.jit(run).trace(state, x).jaxpr
    return _sorted_out(_computed(program, jax.tree.leaves((state, x)), None), [], module)


@contextlib.contextmanager
def _marking(nnx, cls: type, entry: str, module: torch.nn.Module) -> Iterator[None]:
    """While this is open, what the modules below a `cls` take and give is marked, under the names that upstream's have."""
    upstream, names, number = {name for name, _ in module.named_modules()}, {}, itertools.count()
    open_calls = []

    def marked(method: Callable, of_all: bool) -> Callable:
        @functools.wraps(method)
        def run(self, *args, **kwargs):
            if of_all:
                names.update({id(m): _upstream_name(path, cls.names, upstream) for path, m in nnx.iter_modules(self)})
                names[id(self)] = ""
            call, name = next(number), names.get(id(self))
            if name is None or id(self) in open_calls:  # of no name upstream, or a class asking the one it is made of
                return method(self, *args, **kwargs)
            open_calls.append(id(self))
            try:
                output = method(self, *args, **kwargs)
            finally:
                open_calls.remove(id(self))
            for given, values in ((False, (args, kwargs)), (True, output)):
                for leaf, array in enumerate(a for a in jax.tree.leaves(values) if isinstance(a, jax.Array)):
                    capture(array, Tag(name, given, leaf, call))
            return output

        return run

    before = [(c, "__call__", c.__call__) for c in {*_called(nnx.Module)}] + [(cls, entry, getattr(cls, entry))]
    for owner, name, method in before:
        setattr(owner, name, marked(method, owner is cls))
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _called(base: type) -> Iterator[type]:
    """Classes of modules that say what a call of them does."""
    for cls in base.__subclasses__():
        if "__call__" in vars(cls):
            yield cls
        yield from _called(cls)


def _upstream_name(path: tuple, names: tuple, upstream: set[str]) -> str | None:
    """The name of upstream's submodule that has the weights of the module at this path; None where there is none such."""
    from ..video.nnx.weights import torch_name

    name = torch_name((*path, "kernel"), names).rpartition(".")[0]
    plain = ".".join(map(str, path))
    return name if name in upstream else plain if plain in upstream else None
