"""Sharding of weights and activations: name patterns -> PartitionSpec, and the plan of one model class.

A weight's spec is that of its storage. Of a rule's axes, `tp` also holds while the block computes; `dp` and `sp` are storage only
(FSDP) and are gathered when the block runs. So one table serves both: `computed` is the spec during compute. A weight without a
rule is then whole; one with `BY_OUTPUT` keeps its storage spec.
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
# In place of an activation spec: the longest sequence that a block passes to the next is split over `sp`.
INFERRED = "inferred"
TOKENS = PartitionSpec("dp", "sp", None)
# For weights that multiply one vector per sample, not tokens: each chip computes a part of the outputs, which are then exchanged.
BY_OUTPUT = PartitionSpec(AXES)

# Arguments whose first axis is the batch, in each of upstream's transformers that has one of this name.
BATCHED = tuple(
    "hidden_states timestep timestep_r guidance pooled_projections encoder_hidden_states encoder_hidden_states_2"
    " encoder_hidden_states_image encoder_hidden_states_mask encoder_attention_mask encoder_attention_mask_2 image_embeds"
    " joint_attention_kwargs additional_t_cond controlnet_block_samples controlnet_single_block_samples"
    " block_controlnet_hidden_states control_hidden_states pose_hidden_states face_pixel_values video_coords latents_clean"
    " latents_history_2x latents_history_4x".split()
)

Rules = tuple[tuple[str, PartitionSpec], ...]


def together(arrays: list, axis: int, chips: int):
    """Concatenates arrays along an axis, chip by chip: the first chip's part of each, then the next chip's."""
    before, after = arrays[0].shape[:axis], arrays[0].shape[axis + 1 :]
    parts = [x.reshape(*before, chips, -1, *after) for x in arrays]
    return jnp.concatenate(parts, axis + 1).reshape(*before, -1, *after)


def taken_apart(x, axis: int, sizes: tuple[int, ...], chips: int) -> list:
    """The inverse of `together`: arrays of these sizes along the axis."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    ends = [*itertools.accumulate(size // chips for size in sizes)][:-1]
    parts = jnp.split(x.reshape(*before, chips, -1, *after), ends, axis + 1)
    return [part.reshape(*before, -1, *after) for part in parts]


@dataclass(frozen=True)
class Packed:
    """Several projections in the weight of one linear layer, of `sizes` along `axis` (0: outputs, also of the bias; 1: inputs),
    each split over `tp`. They are stored chip by chip: the first chip's part of each, then the next chip's."""

    axis: int
    sizes: tuple[int, ...]
    tp: int = 1

    def order(self) -> list[slice]:
        """The slices of the tensor's axis, in stored order."""
        starts, parts = [*itertools.accumulate(self.sizes, initial=0)], [size // self.tp for size in self.sizes]
        chips = range(self.tp)
        return [slice(start + n * part, start + (n + 1) * part) for n in chips for start, part in zip(starts, parts)]

    def apart(self, x, axis: int):
        """x, whose axis is in stored order, with the projections one after another; no exchange if the reader splits them there."""
        if self.tp == 1:
            return x
        return jnp.concatenate(self.parts(x, axis), axis)

    def parts(self, x, axis: int) -> list:
        """The projections of x, whose axis is in stored order."""
        return taken_apart(x, axis, self.sizes, self.tp)

    def together(self, x):
        """x, whose last axis has the projections one after another, in stored order."""
        if self.tp == 1:
            return x
        return together(jnp.split(x, [*itertools.accumulate(self.sizes)][:-1], -1), x.ndim - 1, self.tp)


@dataclass(frozen=True)
class ModelPlan:
    """What is special about one model class on the TPU.

    Args:
        rules: (regular expression, spec) pairs tried in order against the weight's name, blocks as `blocks.*.`.
            A weight that no rule names is stored over all axes if it is large, else replicated.
        packed: name of a weight or bias -> the projections in it, if a rule splits them over `tp`, or upstream declares that.
        activation_spec: spec of the hidden states [B, T, C] between repeated blocks; or one per output of a block, in order, or by
            the next block's argument name, where None leaves that one to the compiler; `INFERRED`; None leaves all to the compiler.
        batched: names of the forward arguments whose first axis is the batch. Only with them can guidance calls run as one.
        parallel: chips share the work of a call, in a way that the plan defines; True if there is an `activation_spec`.
        whole: weights are stored in their sharding of compute while there is room: with few tokens, gathering takes longer.
        entries: the methods that run on the device.
        decide: bound arguments -> keyword arguments to add or replace: values that a forward would read from tensors, as static
            arguments; or equivalent inputs of another length, so that one program serves.
        processors: class of an attention processor -> function that makes its replacement in a trace, for exactly that class.
        replicated: regular expressions; a submodule whose name matches one computes its whole sequence on every chip.
        methods: (class of the model or a submodule, name) -> function of (object, arguments) that replaces that method in a trace.
        together: parts that `processors` and `methods` replace pass each other what upstream's code does not take: all are replaced, or
            none where a script has hooks or processors of its own; then `decide` is not asked either.
        axes: number of axes of a call's first tensor for which `methods` are used; None: any. Other calls trace upstream's methods.
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
    together: bool = False
    axes: int | None = None
    remark: str = ""

    def __post_init__(self):
        object.__setattr__(self, "parallel", self.parallel or self.activation_spec is not None)
        object.__setattr__(self, "whole", self.whole or self.activation_spec == INFERRED or self.by_width)

    @property
    def by_width(self) -> bool:
        """Whether chips split a map by its columns; `methods` then replace upstream's, which read no neighbours' columns."""
        return self.parallel and self.activation_spec is None


@dataclass
class Coverage:
    """Bytes of all weights on a chip, of the weights that each rule matches, and of large weights that are replicated, by name."""

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
    """The spec during compute: storage axes dropped, except those `kept`."""
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
    """A weight's kind: its name with a star for the number of its block, or a stack's numbers; an adapter's is its layer's."""
    layer = re.sub(r"\.lora_\w+\.[^.]+(?=\.|$)", "", unwrapped(name))
    return re.sub(r"\.(?:\d+|\[\d+:\d+\])(?=\.|$)", ".*", layer)


def storage_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes over which weights are stored, unless they are whole; each slice has all weights."""
    return STORAGE_AXES if slices_of(tuple(mesh.devices.flat)) == 1 else ("sp",)


def stored(
    name: str, shape: tuple[int, ...], rules: Rules, mesh: Mesh | AbstractMesh, over: tuple[str, ...], whole: bool
) -> PartitionSpec:
    """The storage spec of a weight of this shape (without a stack's axis) over these axes; `whole`: that of compute."""
    _, spec = rule_of(name, rules)
    if spec == BY_OUTPUT:
        spec = fit(spec if over == STORAGE_AXES else gathered(spec, over), shape, mesh)
        axes = axes_of(spec[0])
        if "sp" in axes and over == STORAGE_AXES:  # also a `dp` of size one: a program may use a larger dp
            spec = PartitionSpec(tuple(axis for axis in AXES if axis in (*axes, "dp")))
        return spec
    inside = () if whole else over
    if spec is None:
        return default_spec(shape, mesh, inside and (*inside, "tp"))
    return fit(gathered(spec, inside), shape, mesh)


def spread(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """This sharding, split further so that no two chips of a slice have equal parts, along the largest dimension that allows it."""
    mesh, entries = sharding.mesh, [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    taken = {axis for entry in entries for axis in axes_of(entry)}
    free = tuple(axis for axis in (*storage_axes(mesh), "tp") if axis not in taken and mesh.shape[axis] > 1)
    for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
        axes = (*axes_of(entries[dim]), *free)
        if free and shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0:
            return NamedSharding(mesh, PartitionSpec(*entries[:dim], axes, *entries[dim + 1 :]))
    return sharding


def parts_of(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> int:
    """The number of parts into which the spec splits an array."""
    return math.prod(mesh.shape[axis] for entry in spec for axis in axes_of(entry))


def plan_weights(
    shapes: Mapping[str, tuple[tuple[int, ...], int]], rules: Rules, mesh: Mesh, whole: Collection[str] = ()
) -> tuple[dict[str, PartitionSpec], Coverage]:
    """Storage spec of every weight and the coverage report. Raises ValueError for a rule that matches no weight (a dead rule).

    Args:
        shapes: name -> (shape without the stacked axis, bytes of all of it).
        whole: kinds of weights (`kind_of`) with the storage spec of compute; the others are stored over all chips.
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
    """The first rule that matches this weight."""
    return next((rule for rule in rules if re.search(rule[0], unwrapped(name))), ("(no rule)", None))


def computed(name: str, spec: PartitionSpec, rules: Rules) -> PartitionSpec:
    """The spec of a weight, stored with `spec`, while its block computes."""
    rule = rule_of(name, rules)[1]
    return PartitionSpec() if rule is None else spec if rule == BY_OUTPUT else gathered(spec)


def unwrapped(name: str) -> str:
    """A weight's name without the part that PEFT inserts for wrapped layers."""
    return name.replace(".base_layer", "")
