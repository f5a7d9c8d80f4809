"""Builds a pipeline from its configuration alone: real classes, whose weights have a shape and a dtype but take no memory.

The configuration comes from a directory, the hub's cache, or the table of published models.
"""

import contextlib
import importlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_utils import local_torch_dtype

import diffusers

from . import directory_of
from .published import ALIASES, MODELS, Configuration


# Stands in for a chat model's template: only the number of tokens matters here.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
UNKNOWN, PAD = "<unk>", "<pad>"


def configuration_of(model: str) -> Configuration:
    """The configuration of a directory, of a hub id in the local cache, or of a published model, by id or short name.

    "MODEL@PIPELINE": the same weights in another diffusers pipeline, such as image-to-video.

    Raises ValueError for a model that is none of these, or a directory whose model_index.json is missing or invalid.
    """
    directory = directory_of(model)
    if Path(model).is_dir():
        return _read(directory)
    if "@" in model:
        model, _, pipeline = model.rpartition("@")
        return replace(configuration_of(model), pipeline=pipeline)
    if directory is not None:
        with contextlib.suppress(ValueError):  # not fully cached: it may be a published model
            return _read(directory)
    if (published := MODELS.get(ALIASES.get(model.lower(), ALIASES.get(model, model)))) is None:
        raise ValueError(
            f"expected a directory in diffusers layout, a model in the hub's cache or one of the published models, got"
            f" {model!r}. Published: {', '.join(sorted(name for name in ALIASES if '/' not in name))}"
        )
    return published


def _read(directory: Path) -> Configuration:
    index_file = directory / "model_index.json"
    try:
        index = json.loads(index_file.read_text())
        name = index["_class_name"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"expected {index_file} to name a pipeline of diffusers: {error!r}") from error
    components, settings = {}, {}
    for key, value in index.items():
        if key.startswith("_"):
            continue
        if not isinstance(value, list):
            settings[key] = value
        elif value[0] is not None:
            files = (directory / key / f"{kind}config.json" for kind in ("", "scheduler_", "preprocessor_", "guider_"))
            config = next((json.loads(file.read_text()) for file in files if file.is_file()), {})
            components[key] = (".".join(value), config)
    return Configuration(name, components, settings, directory=str(directory))


def build(configuration: Configuration, dtype: torch.dtype, tiled: bool | None = None):
    """The pipeline. Each weight is a view of a single zero on the host, in the dtype that `from_pretrained` would load it in.

    `tiled`: whether the VAE works in tiles; None: as configured. Raises ValueError for an unknown class or a VAE without tiling.
    """
    if (cls := getattr(diffusers, configuration.pipeline, None)) is None:
        raise ValueError(f"expected a pipeline of diffusers, got {configuration.pipeline!r}")
    made = {
        name: _component(name, class_name, dict(config), configuration, dtype)
        for name, (class_name, config) in configuration.components.items()
    }
    expected, settings = map(set, cls._get_signature_keys(cls))
    given = {**dict.fromkeys(expected), **made, **configuration.settings}
    # Arguments that the class does not take are left out, as in from_pretrained.
    pipe = cls(**{name: value for name, value in given.items() if name in expected | settings})
    if configuration.tiled if tiled is None else tiled:
        vae = getattr(pipe, "vae", None)
        if not hasattr(vae, "enable_tiling"):
            raise ValueError(f"expected a pipeline whose VAE can work in tiles, got {configuration.pipeline}")
        vae.enable_tiling()
    return pipe


def _component(name: str, class_name: str, config: dict, configuration: Configuration, dtype: torch.dtype):
    library, _, cls_name = class_name.rpartition(".")
    cls = _class(library, cls_name, configuration.pipeline)
    if "Tokenizer" in cls_name or "Processor" in cls_name:
        if configuration.directory is not None:
            return cls.from_pretrained(configuration.directory, subfolder=name)
        return _tokenizer(configuration.tokens.get(name, 512)) if "Tokenizer" in cls_name else cls(**config)
    if not issubclass(cls, torch.nn.Module):
        return cls.from_config(config)
    with init_empty_weights(), local_torch_dtype(dtype):  # as from_pretrained: buffers get the dtype too
        if issubclass(cls, PreTrainedModel):
            module = cls(cls.config_class(**{**config, "dtype": dtype}))  # as from_pretrained sets it
        else:
            module = cls.from_config(config)
    if isinstance(module, PreTrainedModel):
        module.tie_weights()  # init_empty_weights has separated shared weights
    _weightless(module.eval(), dtype)
    return module


def _class(library: str, name: str, pipeline: str) -> type:
    """The class that model_index.json names: of its library, of the pipeline's package, or of diffusers."""
    try:
        return getattr(importlib.import_module(library), name)
    except (ImportError, AttributeError):
        home = importlib.import_module(getattr(diffusers, pipeline).__module__.rpartition(".")[0])
        if (found := getattr(home, name, None) or getattr(diffusers, name, None)) is None:
            raise ValueError(f"expected a class of diffusers or transformers, got {library}.{name}") from None
        return found


def kept_in_float32(module: torch.nn.Module) -> set[str]:
    """Name components of the weights that `from_pretrained` loads in float32, whatever the requested dtype."""
    # transformers applies the list that is not strict to float16 only
    names = "_keep_in_fp32_modules_strict" if isinstance(module, PreTrainedModel) else "_keep_in_fp32_modules"
    return set(getattr(module, names, None) or ())


def cast_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts the module's weights in place, except those that its class keeps in float32; returns the module."""
    kept, saved = kept_in_float32(module), module.state_dict().keys()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and name in saved and not kept & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return module


def _weightless(module: torch.nn.Module, dtype: torch.dtype):
    """Replaces each parameter by a view of a single zero, in the dtype of `from_pretrained`; buffers keep their values."""
    kept, seen = kept_in_float32(module), {}
    for path, owner in module.named_modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in seen:
                zero = torch.zeros((), dtype=torch.float32 if kept & {*path.split("."), name} else dtype)
                seen[id(old)] = torch.nn.Parameter(zero.expand(old.shape), requires_grad=False)
            owner._parameters[name] = seen[id(old)]


def _tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer that pads and truncates as the real one does; every word and every punctuation mark is one token."""
    tokenizer = Tokenizer(models.WordLevel({PAD: 0, UNKNOWN: 1}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN, pad_token=PAD, eos_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = max_length
    return fast
