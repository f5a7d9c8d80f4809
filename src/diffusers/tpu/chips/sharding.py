"""Where weights and activations lie: name patterns -> PartitionSpec, and the plan of one model class.

A weight's spec names its storage. Of a rule's, `tp` stays while the block computes; `dp` and `sp` are storage only (FSDP) and are
gathered when the block runs, so one table serves both: `computed` is the spec during compute. A weight without a rule is whole then;
one by `BY_OUTPUT` lies as it is stored.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .mesh import AXES, slices_of


STORAGE_AXES = ("dp", "sp")
LARGE_ELEMENTS = 1 << 16
# In place of specs between blocks: the longest sequence that a block hands to the next lies over `sp`.
INFERRED = "inferred"
TOKENS = PartitionSpec("dp", "sp", None)
# Of weights that meet a vector a sample, no tokens: each chip computes its part of the outputs, which are exchanged then.
BY_OUTPUT = PartitionSpec(AXES)

Rules = tuple[tuple[str, PartitionSpec], ...]


def together(arrays: list, axis: int, chips: int):
    """Arrays along an axis as one: the first chip's part of each, then the next chip's."""
    before, after = arrays[0].shape[:axis], arrays[0].shape[axis + 1 :]
    parts = [x.reshape(*before, chips, -1, *after) for x in arrays]
    return jnp.concatenate(parts, axis + 1).reshape(*before, -1, *after)


def taken_apart(x, axis: int, sizes: tuple[int, ...], chips: int) -> list:
    """The arrays of `together`, of these sizes along the axis."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    ends = [*itertools.accumulate(size // chips for size in sizes)][:-1]
    parts = jnp.split(x.reshape(*before, chips, -1, *after), ends, axis + 1)
    return [part.reshape(*before, -1, *after) for part in parts]


@dataclass(frozen=True)
class Packed:
    """Several projections in the weight of one linear layer, of `sizes` along `axis` (0: outputs, of the bias too; 1: inputs), each of
    which is split over `tp`: stored is the first chip's part of each, then the next chip's."""

    axis: int
    sizes: tuple[int, ...]
    tp: int = 1

    def order(self) -> list[slice]:
        """The parts of the tensor's axis as they are stored."""
        starts, parts = [*itertools.accumulate(self.sizes, initial=0)], [size // self.tp for size in self.sizes]
        chips = range(self.tp)
        return [slice(start + n * part, start + (n + 1) * part) for n in chips for start, part in zip(starts, parts)]

    def apart(self, x, axis: int):
        """x, whose axis is as stored, with the projections one after another. Without an exchange, where who reads takes them apart there."""
        if self.tp == 1:
            return x
        return jnp.concatenate(self.parts(x, axis), axis)

    def parts(self, x, axis: int) -> list:
        """The projections of x, whose axis is as stored."""
        return taken_apart(x, axis, self.sizes, self.tp)

    def together(self, x):
        """x, whose last axis has them one after another, as stored."""
        if self.tp == 1:
            return x
        return together(jnp.split(x, [*itertools.accumulate(self.sizes)][:-1], -1), x.ndim - 1, self.tp)


@dataclass(frozen=True)
class ModelPlan:
    """What is special about one model class on the TPU.

    Args:
        rules: (regular expression, spec) pairs tried in order against the weight's name, blocks as `blocks.*.`.
            A weight that no rule names is stored over all axes if it is large, else replicated.
        packed: name of a weight or bias -> the projections in it, where a rule splits them over `tp`, or upstream declares that it would.
        activation_spec: spec of the hidden states between repeated blocks [B, T, C], or of each of a block's outputs in their order, or by
            the name of the next block's argument, None for one that the compiler may lay as it likes; `INFERRED`; None leaves all to the compiler.
        batched: names of the forward arguments whose first axis is the batch. Only with them can guidance calls run as one.
        parallel: chips share the work of one call, in the plan's own way; true where there is an `activation_spec`.
        whole: weights are stored as they are computed with while there is room: a call has few tokens, and to gather them takes longer.
        entries: the methods that run on the device.
        decide: bound arguments -> keyword arguments, further ones or other values of given ones: what a forward would read from
            tensor values, passed as static arguments; or inputs of another length that mean the same, so that one program serves.
        processors: class of an attention processor -> what makes the one that is traced in place of one of exactly that class.
        replicated: regular expressions; a part whose name has one of them computes its sequence whole on every chip, not split.
        methods: (class of the model or of a part, name) -> the function of (object, arguments) that is traced in place of that method.
        axes: of the first tensor of a call that `methods` stand for; None: of any. Upstream's own lines are traced for others.
        remark: what `diffusers-tpu plan` says of the model.
    """

    rules: Rules = ()
    packed: Mapping[str, Packed] = field(default_factory=dict)
    activation_spec: PartitionSpec | tuple[PartitionSpec | None, ...] | Mapping[str, PartitionSpec] | str | None = None
    batched: tuple[str, ...] = ()
    parallel: bool = False
    whole: bool = False
    entries: tuple[str, ...] = ("forward",)
    decide: Callable[[dict], dict] | None = None
    processors: Mapping[type, Callable] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    methods: Mapping[tuple[type, str], Callable] = field(default_factory=dict)
    axes: int | None = None
    remark: str = ""

    def __post_init__(self):
        object.__setattr__(self, "parallel", self.parallel or self.activation_spec is not None)
        object.__setattr__(self, "whole", self.whole or self.activation_spec == INFERRED or self.by_width)

    @property
    def by_width(self) -> bool:
        """Chips share a map by its columns: `methods` stand for upstream's lines where these read no others."""
        return self.parallel and self.activation_spec is None


@dataclass
class Coverage:
    """Which rule took which weights: `bytes_by_rule`, `replicated` (name -> bytes), and how many bytes a chip holds of all."""

    bytes_per_chip: int = 0
    bytes_by_rule: dict[str, int] = field(default_factory=dict)
    replicated: dict[str, int] = field(default_factory=dict)


def axes_of(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def fit(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """`spec` without the axes that do not divide their dimension (outermost dropped last) and those of size one."""
    entries = []
    for size, entry in zip(shape, (*spec, *(None,) * (len(shape) - len(spec)))):
        axes = [axis for axis in axes_of(entry) if mesh.shape[axis] > 1]
        while axes and size % math.prod(mesh.shape[axis] for axis in axes):
            axes.pop()
        entries.append(tuple(axes))
    return PartitionSpec(*entries)


def gathered(spec: PartitionSpec, kept: tuple[str, ...] = ()) -> PartitionSpec:
    """The spec during compute: storage axes dropped, but those `kept`."""
    return PartitionSpec(*(tuple(a for a in axes_of(entry) if a not in STORAGE_AXES or a in kept) for entry in spec))


def default_spec(shape: tuple[int, ...], mesh: Mesh, inside: tuple[str, ...] = AXES) -> PartitionSpec:
    """Storage of a weight that no rule names: its largest divisible dimension over these axes, or one of them, if it is large."""
    if math.prod(shape) < LARGE_ELEMENTS or not inside:
        return PartitionSpec()
    several = (inside[:n] for n in range(len(inside), 1, -1))
    for axes in dict.fromkeys((*several, *((axis,) for axis in ("sp", "dp", "tp") if axis in inside))):
        for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
            spec = PartitionSpec(*(axes if d == dim else None for d in range(len(shape))))
            fitted = fit(spec, shape, mesh)
            if fitted[dim] is not None and len(axes_of(fitted[dim])) == sum(mesh.shape[a] > 1 for a in axes):
                return fitted
    return PartitionSpec()


def kind_of(name: str) -> str:
    """Of a weight: its name with a star for the number of its block, or for those of a stack's blocks; of an adapter's its layer's."""
    layer = re.sub(r"\.lora_\w+\.[^.]+(?=\.|$)", "", unwrapped(name))
    return re.sub(r"\.(?:\d+|\[\d+:\d+\])(?=\.|$)", ".*", layer)


def storage_axes(mesh: Mesh) -> tuple[str, ...]:
    """Over which weights are stored that are not whole: each slice has all of them."""
    return STORAGE_AXES if slices_of(tuple(mesh.devices.flat)) == 1 else ("sp",)


def stored(
    name: str, shape: tuple[int, ...], rules: Rules, mesh: Mesh | AbstractMesh, over: tuple[str, ...], whole: bool
) -> PartitionSpec:
    """How a weight of this shape, a stack's without the stacked axis, is stored over these axes; `whole`: as it is computed with."""
    _, spec = rule_of(name, rules)
    if spec == BY_OUTPUT:
        spec = fit(spec if over == STORAGE_AXES else gathered(spec, over), shape, mesh)
        axes = axes_of(spec[0])
        if "sp" in axes and over == STORAGE_AXES:  # `dp` of one chip too: a program may have more of them on it
            spec = PartitionSpec(tuple(axis for axis in AXES if axis in (*axes, "dp")))
        return spec
    inside = () if whole else over
    if spec is None:
        return default_spec(shape, mesh, inside and (*inside, "tp"))
    return fit(gathered(spec, inside), shape, mesh)


def spread(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """A sharding like this one by which no two chips of a slice have the same part, where a dimension can be split so, the largest first."""
    mesh, entries = sharding.mesh, [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    taken = {axis for entry in entries for axis in axes_of(entry)}
    free = tuple(axis for axis in (*storage_axes(mesh), "tp") if axis not in taken and mesh.shape[axis] > 1)
    for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
        axes = (*axes_of(entries[dim]), *free)
        if free and shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0:
            return NamedSharding(mesh, PartitionSpec(*entries[:dim], axes, *entries[dim + 1 :]))
    return sharding


def parts_of(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> int:
    """In how many parts it splits an array."""
    return math.prod(mesh.shape[axis] for entry in spec for axis in axes_of(entry))


def plan_weights(
    shapes: Mapping[str, tuple[tuple[int, ...], int]], rules: Rules, mesh: Mesh, whole: Collection[str] = ()
) -> tuple[dict[str, PartitionSpec], Coverage]:
    """Storage spec of every weight and the coverage report. Raises ValueError for a rule that matches no weight (a dead rule).

    Args:
        shapes: name -> (shape without the stacked axis, bytes of all of it).
        whole: kinds of weights (`kind_of`) that lie as they are computed with; the others are stored over all chips.
    """
    specs, coverage, over = {}, Coverage(), storage_axes(mesh)
    for name, (shape, size_bytes) in shapes.items():
        label, _ = rule_of(name, rules)
        specs[name] = stored(name, shape, rules, mesh, over, kind_of(name) in whole)
        parts = parts_of(specs[name], mesh)
        coverage.bytes_per_chip += size_bytes // parts
        coverage.bytes_by_rule[label] = coverage.bytes_by_rule.get(label, 0) + size_bytes
        if parts == 1 and math.prod(shape) >= LARGE_ELEMENTS and mesh.size > 1:
            coverage.replicated[name] = size_bytes
    if dead := [pattern for pattern, _ in rules if pattern not in coverage.bytes_by_rule]:
        raise ValueError(
            f"expected every sharding rule to match a weight, got dead rules {dead}. Names look like {list(shapes)[:3]}"
        )
    return specs, coverage


def rule_of(name: str, rules: Rules) -> tuple[str, PartitionSpec | None]:
    """The first rule that names this weight."""
    return next((rule for rule in rules if re.search(rule[0], unwrapped(name))), ("(no rule)", None))


def computed(name: str, spec: PartitionSpec, rules: Rules) -> PartitionSpec:
    """Where a weight that is stored so lies while its block computes."""
    rule = rule_of(name, rules)[1]
    return PartitionSpec() if rule is None else spec if rule == BY_OUTPUT else gathered(spec)


def unwrapped(name: str) -> str:
    """A weight's name without PEFT's for the layer that it wraps."""
    return name.replace(".base_layer", "")
