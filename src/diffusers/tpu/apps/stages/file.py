"""The file between two stages: safetensors with every tensor in its own dtype and the settings as JSON in the metadata."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import PIL.Image
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from .... import __version__
from ...common.files import write_whole


FORMAT = 1
METADATA = "diffusers-tpu stage"
EARLIER = {  # of the earlier TPU scripts' stages, whose files name neither model nor call
    "prompt_embeds": "embeddings of an earlier script's first stage, which `pipe(prompt_embeds=...)` takes",
    "latents": "latents of an earlier script's second stage: `pipe.vae.decode` takes them, denormalized",
}
MODES = ("L", "RGB", "RGBA")  # of pictures: those whose values are bytes


@dataclass(frozen=True)
class Settings:
    """The settings of a run and its last stage, stored as JSON in the file."""

    stage: str  # that wrote the file
    model: str  # as the user called it
    fingerprint: str  # of the model's configurations
    pipeline: str  # the name of its class
    dtype: str | None  # of the weights; None: as from_pretrained chooses
    seed: int
    call: dict  # arguments of `__call__` that were given, packed
    vae_dtype: str | None = None  # of the VAE that encoded pixels
    ran: dict = field(default_factory=dict)  # by stage, where it ran, as text
    package: str = __version__
    format: int = FORMAT


def save(path, settings: Settings, tensors: dict[str, torch.Tensor]):
    """Write the file atomically."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    described = {name: _description(tensor) for name, tensor in tensors.items()}
    metadata = {METADATA: json.dumps({**asdict(settings), "tensors": described})}
    write_whole(Path(path), safetensors.torch.save(tensors, metadata))  # save_file's is readable to its owner only


def read(path, stage: str) -> tuple[Settings, dict[str, torch.Tensor]]:
    """Settings and tensors of the file that `stage` wrote.

    Raises ValueError: no such file, truncated, not a stage's, of another stage, format or package, or changed since.
    """
    again = f"run the stage {stage} again"
    try:
        with safe_open(path, "pt") as file:
            found = json.loads((file.metadata() or {}).get(METADATA, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"expected {path} to be a whole file of the stage {stage}, got {error}; {again}") from error
    if not isinstance(found, dict):
        got = next((words for name, words in EARLIER.items() if name in tensors), "safetensors that no stage wrote")
        raise ValueError(f"expected a file of the stage {stage}, got {path}, {got}; {again}")
    for name, wanted in (("format", FORMAT), ("package", __version__), ("stage", stage)):
        if found.get(name) != wanted:
            way_out = "give that stage's file" if name == "stage" else f"{again} with this version"
            raise ValueError(f"expected {path} of {name} {wanted}, got {found.get(name)}; {way_out}")
    names = {f.name for f in fields(Settings)} | {"tensors"}
    if set(found) != names:
        raise ValueError(f"expected {path} to hold {sorted(names)}, got {sorted(found)}; {again}")
    described = found.pop("tensors")
    there = {name: _description(tensor) for name, tensor in tensors.items()}
    if described != there:
        raise ValueError(f"expected in {path} tensors {described}, got {there}: it was changed; {again}")
    return Settings(**found), tensors


def _description(tensor: torch.Tensor) -> list:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def pack(name: str, value, tensors: dict[str, torch.Tensor]):
    """An argument as JSON; pictures and arrays go to `tensors` under names made of `name`, with their digest in the JSON.

    Raises TypeError for a value that a file cannot hold.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [pack(f"{name}.{number}", part, tensors) for number, part in enumerate(value)]
    if isinstance(value, PIL.Image.Image) and value.mode in MODES:
        kind, tensor = value.mode, torch.from_numpy(np.array(value))
    elif isinstance(value, np.ndarray):
        kind, tensor = "array", torch.from_numpy(value)
    elif isinstance(value, torch.Tensor):
        kind, tensor = "tensor", value.detach().cpu()
    else:
        got = f"a picture of mode {value.mode}" if isinstance(value, PIL.Image.Image) else type(value).__name__
        raise TypeError(
            f"expected {name} of numbers, words, arrays or {'/'.join(MODES)} pictures, got {got}: a stage file cannot hold it"
        )
    tensors[name] = tensor
    values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"tensor": name, "kind": kind, "is": _description(tensor), "sha256": hashlib.sha256(values).hexdigest()}


def unpack(packed, tensors: dict[str, torch.Tensor]):
    """The argument that was given to `pack`."""
    if isinstance(packed, list):
        return [unpack(part, tensors) for part in packed]
    if not isinstance(packed, dict):
        return packed
    tensor = tensors[packed["tensor"]]
    if packed["kind"] == "tensor":
        return tensor
    return tensor.numpy() if packed["kind"] == "array" else PIL.Image.fromarray(tensor.numpy(), packed["kind"])
