"""Entry methods of a module, replaced on the instance; and a model that stays on the host.

`CompiledModule` and `HostModel` both replace methods of a module (`forward`, `encode`, `decode`) until they are detached.
"""

import functools
import inspect

import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import bridge
from ..weights.checkpoint import settled
from .state import Arguments, is_entry, write_back


class EntryMethods:
    """Calls of some methods of a module go to `called`. The module's attribute NAME holds this object."""

    NAME: str

    def __init__(self, module: torch.nn.Module, entries: tuple[str, ...], mesh: Mesh):
        self.module, self.entries, self.mesh = module, entries, mesh
        self._replaced: dict[str, object] = {}  # the instance's former methods; None: the class's
        self._signatures: dict[str, inspect.Signature] = {}

    def attach(self):
        """Replace the module's entry methods."""
        self.replace()
        setattr(self.module, self.NAME, self)
        self.module._hf_hook = bridge.ExecutionDevice(vars(self.module).get("_hf_hook"))

    def detach(self):
        """Restore the former methods; methods that the user has set since stay."""
        self.put_back()
        vars(self.module).pop(self.NAME, None)
        if isinstance(hook := vars(self.module).get("_hf_hook"), bridge.ExecutionDevice):
            del self.module._hf_hook
            if hook.former is not None:
                self.module._hf_hook = hook.former
        self._replaced.clear()

    def replace(self):
        for name in self.entries:
            self._signatures[name] = inspect.signature(getattr(self.module, name))
            self._replaced[name] = vars(self.module).get(name)
            setattr(self.module, name, self._entry(name))

    def put_back(self):
        for name, own in self._replaced.items():
            if is_entry(vars(self.module).get(name)):
                delattr(self.module, name)
                if own is not None:
                    setattr(self.module, name, own)

    def original(self, name: str):
        """The former method: the class's, as it is now, or the instance's own."""
        return self._method(name, self._replaced[name])

    def _method(self, name: str, own):
        return getattr(type(self.module), name).__get__(self.module) if own is None else own

    def on_host(self, name: str, args: tuple, kwargs: dict):
        """The original's return value in plain torch, put on the chips if the environment is active. It may write to arguments."""
        env, given = bridge.environment(), (args, kwargs)
        settled(list(self.module.parameters()), list(self.module.buffers()))
        tensors = {id(t): t for t in tree_leaves(given) if isinstance(t, bridge.Tensor)}
        with torch.inference_mode(False):
            hosts = {key: env.host(t) for key, t in tensors.items()}
        args, kwargs = tree_map_only(bridge.Tensor, lambda t: hosts[id(t)], given) if hosts else given
        held = Arguments((args, kwargs) if hosts else (), [*hosts.values()])
        differentiable = torch.is_grad_enabled() and not env.active  # not in a call that runs on the chips
        with env.left(), torch.inference_mode(False), torch.set_grad_enabled(differentiable):
            output = self.original(name)(*args, **kwargs)
        written, values = held.written([n for n, t in enumerate(held.tensors) if t._version], lambda leaf: leaf)
        if env.active:
            there = functools.partial(bridge.to_jax, sharding=NamedSharding(self.mesh, PartitionSpec()))
            output, values = tree_map_only(torch.Tensor, lambda t: bridge.to_torch(there(t)), (output, values))
        write_back(written, given, [*tensors.values()], values)
        return output

    def _entry(self, name: str):
        @functools.wraps(self.original(name))
        def run(*args, **kwargs):
            if name not in self._replaced:  # detached, but a wrapper, accelerate's say, still holds it
                return self._method(name, run.tpu_own)(*args, **kwargs)
            return self.called(name, args, kwargs)

        run.__signature__ = self._signatures[name]
        run.tpu_own = self._replaced[name]
        return run


class HostModel(EntryMethods):
    """Runs a module in plain torch: device tensors among its arguments are copied to the host, its results to the chips."""

    NAME = "_tpu_host"
    called = EntryMethods.on_host
