"""Weights from host tensors to sharded arrays, one at a time: each chip gets only its part, blocks come stacked."""

from dataclasses import dataclass, field

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from .bridge import as_numpy, numpy_dtype
from .scan import Group, find_groups
from .sharding import Coverage, ModelPlan, named, plan_weights


@dataclass
class PlacedWeights:
    """A module's weights on the mesh. The module keeps its host tensors; what changes there is placed again.

    Attributes:
        arrays: key -> array; a group's weights under `label.name`, stacked.
        sources: key -> the module's tensor names that make it up.
        specs: key -> storage spec of the array, the stacked axis left out.
    """

    module: torch.nn.Module
    mesh: Mesh
    groups: list[Group]
    sources: dict[str, list[str]]
    specs: dict
    coverage: Coverage
    arrays: dict[str, jax.Array] = field(default_factory=dict)
    versions: dict[str, tuple] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Place what is new or was changed on the host since. Returns whether names, shapes or dtypes changed."""
        tensors = named_tensors(self.module)
        stale = []
        for key, names in self.sources.items():
            if any(name not in tensors for name in names):
                return True
            if self.versions.get(key) != (version := _version(tensors, names)):
                stale.append((key, names, version))
        if sum(map(len, self.sources.values())) != len(tensors):
            return True
        for key, names, version in stale:
            old = self.arrays.get(key)
            new = self._place([tensors[name] for name in names], self.specs[key], stacked=_is_stacked(key))
            if old is not None and (old.shape, old.dtype) != (new.shape, new.dtype):
                return True
            self.arrays[key] = new
            self.versions[key] = version
        return False

    def _place(self, tensors: list[torch.Tensor], spec, stacked: bool) -> jax.Array:
        if not stacked:
            values = as_numpy(tensors[0])
            return _put(values.shape, values.dtype, named(self.mesh, spec), lambda index: values[index])
        views = [as_numpy(t) for t in tensors]
        sharding = named(self.mesh, jax.sharding.PartitionSpec(None, *spec))

        def part(index):
            return np.stack([view[index[1:]] for view in views[index[0]]])

        return _put((len(views), *views[0].shape), views[0].dtype, sharding, part)

    def avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and layouts of the arrays, from the host tensors alone."""
        tensors = named_tensors(self.module)
        avals = {}
        for key, names in self.sources.items():
            first = tensors[names[0]]
            stacked = _is_stacked(key)
            shape = (len(names), *first.shape) if stacked else tuple(first.shape)
            spec = jax.sharding.PartitionSpec(None, *self.specs[key]) if stacked else self.specs[key]
            avals[key] = jax.ShapeDtypeStruct(shape, numpy_dtype(first.dtype), sharding=named(self.mesh, spec))
        return avals


def plan_placement(module: torch.nn.Module, plan: ModelPlan, mesh: Mesh, scan: bool) -> PlacedWeights:
    """Where every weight of the module will lie; nothing is moved yet."""
    tensors = named_tensors(module)
    groups = find_groups(module) if scan else []
    sources = {}
    for group in groups:
        block = module.get_submodule(f"{group.path}.{group.start}")
        for name in named_tensors(block):
            sources[f"{group.label}.{name}"] = group.names(name)
    taken = {name for names in sources.values() for name in names}
    sources.update({name: [name] for name in tensors if name not in taken})
    shapes = {
        key: (tuple(tensors[names[0]].shape), sum(tensors[name].nbytes for name in names))
        for key, names in sources.items()
    }
    specs, coverage = plan_weights(shapes, plan.rules, mesh)
    return PlacedWeights(module, mesh, groups, sources, specs, coverage)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones once."""
    return dict((*module.named_parameters(), *module.named_buffers()))


def _is_stacked(key: str) -> bool:
    return "*" in key or "[" in key


def _version(tensors: dict, names: list[str]) -> tuple:
    """Changes when a tensor is replaced, written to, or given other data (as `module.to(dtype)` does)."""
    return tuple((id(t), t._version, t.dtype, t.data_ptr()) for t in (tensors[name] for name in names))


def _put(shape, dtype, sharding, part) -> jax.Array:
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: np.asarray(part(index), dtype))
