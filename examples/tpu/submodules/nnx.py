"""Traces a component's form in plain JAX and marks inputs and outputs of its modules, under upstream's names."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.utils._pytree import tree_leaves

from diffusers.models.autoencoders.vae_nnx_weights_flax import torch_name
from diffusers.tpu.bridge import as_numpy
from diffusers.tpu.compare.pipelines import Call
from diffusers.tpu.pipelines.plans import VAE_ENTRIES, flax_class

from .marks import Tag, capture


def trace_nnx(
    module: torch.nn.Module, dtype: torch.dtype, mesh, call: Call
) -> tuple[jax.extend.core.ClosedJaxpr, list]:
    """Returns the program of a VAE's call, and its flat arguments.

    Raises:
        ValueError: an entry that the form in plain JAX does not have.
    """
    if call.entry not in VAE_ENTRIES:
        raise ValueError(f"expected an entry of the form in plain JAX ({', '.join(VAE_ENTRIES)}), got {call.entry}")
    vae = flax_class(type(module).__name__).from_torch(module, dtype=str(dtype).removeprefix("torch."), mesh=mesh)
    for name in vars(vae):
        if name == "use_tiling" or name.startswith("tile_sample_"):
            setattr(vae, name, getattr(module, name, getattr(vae, name)))
    (x,) = (t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor))
    x = jnp.asarray(np.moveaxis(as_numpy(x), 1, -1), vae.dtype)
    state, run = vae.traceable(call.entry)
    with _marking(type(vae), f"_{call.entry}", {name for name, _ in module.named_modules()}):
        return jax.jit(run).trace(state, x).jaxpr, jax.tree.leaves((state, x))


@contextlib.contextmanager
def _marking(cls: type, entry: str, upstream: set[str]) -> Iterator[None]:
    """A context in which traces mark the inputs and outputs of the modules below a `cls`."""
    names, numbers, open_calls = {}, itertools.count(), []

    def marked(method: Callable, of_all: bool) -> Callable:
        @functools.wraps(method)
        def run(self, *args, **kwargs):
            if of_all:
                names.update({id(m): _upstream_name(path, cls.names, upstream) for path, m in nnx.iter_modules(self)})
                names[id(self)] = ""
            call, name = next(numbers), names.get(id(self))
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

    with contextlib.ExitStack() as stack:
        for owner, name in [*((c, "__call__") for c in {*_callable(nnx.Module)}), (cls, entry)]:
            method = marked(getattr(owner, name), owner is cls)
            stack.enter_context(mock.patch.object(owner, name, method))
        yield


def _callable(base: type) -> Iterator[type]:
    """Yields subclasses that define `__call__`."""
    for cls in base.__subclasses__():
        if "__call__" in vars(cls):
            yield cls
        yield from _callable(cls)


def _upstream_name(path: tuple, names: tuple, upstream: set[str]) -> str | None:
    """Returns the name of upstream's submodule with the weights of the module at this path, None where there is none."""
    name, plain = torch_name((*path, "kernel"), names).rpartition(".")[0], ".".join(map(str, path))
    return name if name in upstream else plain if plain in upstream else None
