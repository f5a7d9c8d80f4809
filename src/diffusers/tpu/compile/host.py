"""A model that stays on the host: upstream's forward in plain torch, for glue whose tensors may be on the chips."""

import functools

import torch
from jax.sharding import Mesh

from .. import bridge
from .eager import run_on_host


class HostModel:
    """Takes the entry methods of one module over: device tensors come to the host, what it answers goes to the chips."""

    def __init__(self, module: torch.nn.Module, entries: tuple[str, ...], mesh: Mesh):
        self.module, self.entries, self.mesh = module, entries, mesh
        self._own: dict[str, object] = {}

    def attach(self):
        for entry in self.entries:
            self._own[entry] = vars(self.module).get(entry)
            setattr(self.module, entry, self._entry(getattr(self.module, entry)))
        self.module._tpu_host = self
        self.module._hf_hook = bridge.ExecutionDevice()

    def detach(self):
        for entry, own in self._own.items():
            vars(self.module).pop(entry, None)
            if own is not None:
                setattr(self.module, entry, own)
        for name in ("_tpu_host", "_hf_hook"):
            vars(self.module).pop(name, None)
        self._own.clear()

    def _entry(self, original):
        @functools.wraps(original)
        def run(*args, **kwargs):
            return run_on_host(self.module, original, args, kwargs, self.mesh)

        return run
