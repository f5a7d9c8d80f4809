"""Config and weights of upstream's VAEs, from their files or the module, for the NNX form; one tensor at a time."""

import inspect
import json
import os
import re

import jax
import numpy as np
import torch
from flax import nnx
from safetensors import SafetensorError, safe_open

from ...configuration_utils import FrozenDict
from ...utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from ...utils.hub_utils import _add_variant, _get_checkpoint_shard_files, _get_model_file


SHOWN = 8  # names in a message


class Config(FrozenDict):
    """Upstream's config with a hash, as it is a part of the cache key of a module's programs."""

    def __hash__(self):
        return hash(json.dumps(self, sort_keys=True))


def whole_config(upstream: type, config: dict) -> Config:
    """The config with the defaults of upstream's class, its sequences as lists.

    Raises ValueError for an unknown key, and for the config of another class.
    """
    known = {name: p.default for name, p in inspect.signature(upstream.__init__).parameters.items() if name != "self"}
    name = config.get("_class_name", upstream.__name__)
    if name != upstream.__name__:
        raise ValueError(f"expected the config of an {upstream.__name__}, got one of {name}")
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(f"expected a config of {', '.join(known)}, got also {', '.join(unknown)}")
    return Config(json.loads(json.dumps({**known, **given})))


def open_files(upstream: type, path, subfolder: str | None, variant: str | None, hub: dict) -> tuple[dict, dict]:
    """(config, tensors by name, mapped and not read) of a directory or of a hub's repository, as upstream's class saves them.

    Raises ValueError for a file that is no safetensors file, OSError for a missing one.
    """
    path = str(path)
    if os.path.isdir(path):
        folder = os.path.join(path, subfolder or "")
        if not os.path.isdir(folder):
            raise OSError(f"expected a folder {subfolder} in {path}, got {sorted(os.listdir(path))}")
        path, subfolder = folder, None
    config = upstream.load_config(path, subfolder=subfolder, **hub)
    tensors = {}
    for file in _files(path, subfolder, variant, hub):
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"expected {file} to be a safetensors file, got one that cannot be read ({error}): fetch it again"
            ) from error
        tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    return config, tensors


def _files(path: str, subfolder: str | None, variant: str | None, hub: dict) -> list[str]:
    """The one file of weights, or those that an index names."""
    try:
        name = _add_variant(SAFE_WEIGHTS_INDEX_NAME, variant)
        index = _get_model_file(path, weights_name=name, subfolder=subfolder, **hub)
    except OSError:
        name = _add_variant(SAFETENSORS_WEIGHTS_NAME, variant)
        return [_get_model_file(path, weights_name=name, subfolder=subfolder, **hub)]
    hub = {key: value for key, value in hub.items() if key != "force_download"}
    return _get_checkpoint_shard_files(path, index, subfolder=subfolder or "", **hub)[0]


def torch_name(path: tuple, names: tuple[tuple[str, str], ...]) -> str:
    """The name in upstream's files of the weight at this path of a module: all rules (pattern, replacement) applied in turn."""
    name = ".".join(map(str, path))
    for pattern, replacement in names:
        name = re.sub(pattern, replacement, name)
    return name


def load_weights(vae: nnx.Module, names: tuple[tuple[str, str], ...], tensors: dict, source: str) -> nnx.Module:
    """The abstract module, filled with these weights by name, each with its shape's sharding. `names`: the rules of `torch_name`.

    Raises ValueError for missing or unknown names, and for shapes that differ, before anything is placed.
    """
    state = [(path, torch_name(path, names), v.get_value()) for path, v in nnx.to_flat_state(nnx.state(vae))]
    wanted = {name: value for _, name, value in state}
    misfits = (_misfit(name, wanted[name], tensors[name]) for name in sorted(wanted.keys() & tensors.keys()))
    found = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "not known": sorted(tensors.keys() - wanted.keys()),
        "of another shape": [misfit for misfit in misfits if misfit],
    }
    if any(found.values()):
        problems = "; ".join(f"{what}: {_listed(names)}" for what, names in found.items() if names)
        raise ValueError(
            f"expected the {len(wanted)} weights that the config asks for in {source}, got {problems}."
            " Are config and weights of one model?"
        )
    flat = [(path, nnx.Param(_placed(value, tensors[name]))) for path, name, value in state]
    nnx.update(vae, nnx.from_flat_state(flat))
    return vae


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _misfit(name: str, wanted: jax.ShapeDtypeStruct, tensor: torch.Tensor) -> str | None:
    """A text if the tensor's shape, in torch's order, does not fit the wanted one; else None."""
    shape = wanted.shape
    if len(shape) == 5:  # upstream's convolution of images has no time axis
        time, height, width, channels, features = shape
        fits = [(features, channels, time, height, width)] + [(features, channels, height, width)] * (time == 1)
    else:
        fits = [(*shape, *(1,) * axes) for axes in (range(2, 4) if name.endswith("gamma") else [0])]
    return None if tuple(tensor.shape) in fits else f"{name} {list(tensor.shape)} instead of {list(fits[-1])}"


def _placed(wanted: jax.ShapeDtypeStruct, tensor: torch.Tensor) -> jax.Array:
    """A tensor in its new layout and dtype: kernels [O, I, (T,) H, W] as [T, H, W, I, O], others without axes of one."""
    tensor = tensor.detach().cpu().float()
    if len(wanted.shape) == 5:
        tensor = tensor.movedim((0, 1), (-1, -2))
    values = tensor.numpy().reshape(wanted.shape).astype(wanted.dtype)
    return jax.device_put(np.ascontiguousarray(values), wanted.sharding)
