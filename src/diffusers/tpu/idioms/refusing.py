"""Refuses what the TPU path does not support, with the reason and the way out: quantized weights, and some gradients."""

import functools
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves, tree_map


LOADS_ANYWHERE = {"torchao", "quanto", "gguf"}  # other methods need a GPU to load
INSTEAD = (
    "load the model without quantization_config, in bfloat16: its weights are split over all chips, and models that have no"
    " room wait on the host"
)


def refuse_quantizer(method: str):
    """Raises NotImplementedError for quantization whose package needs a GPU."""
    method = getattr(method, "value", method)
    if method not in LOADS_ANYWHERE:
        raise NotImplementedError(
            f"expected a model without quantization on the TPU path, got {method!r}, which needs a GPU: {INSTEAD}."
            " DIFFUSERS_TPU=off leaves the path."
        )


def before_loading(load: Callable) -> Callable:
    """A model's `from_pretrained` that refuses quantization for GPUs before the quantizing package is called."""

    @functools.wraps(load)
    def run(*args, **kwargs):
        if (config := kwargs.get("quantization_config")) is not None:
            get = config.get if isinstance(config, dict) else functools.partial(getattr, config)
            refuse_quantizer(get("quant_method", None))
        return load(*args, **kwargs)

    return run


def refuse_weights(model: str, name: str, tensor: torch.Tensor):
    """Raises NotImplementedError: this weight of the model is quantized."""
    raise NotImplementedError(
        f"expected ordinary weights of {model} on the TPU path, got {name} of class {type(tensor).__name__}: quantized"
        f" weights have no form there. Instead, {INSTEAD}; or keep this component on the host as it is, by"
        " TPUConfig(host=(its name,))"
    )


GRADIENTS = (
    "the TPU path goes back through compiled calls outside of a pipeline's own: this model is not compiled as it is now"
    " (diffusers.tpu.report says why), has a step cache, or was called within pipe(...). To differentiate it on the host,"
    " diffusers.tpu.uninstall(pipe) first (or .to('cpu')), or TPUConfig(host=('unet',)) for one model of a pipeline"
)


class _Refusing(torch.autograd.Function):
    """Returns its last inputs, as functions of the first `asked` tensors whose gradient raises NotImplementedError."""

    @staticmethod
    def forward(ctx, asked: int, *tensors):
        return tuple(t.new_empty(0).set_(t) for t in tensors[asked:])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(GRADIENTS)


def asking(module: torch.nn.Module, arguments) -> list[torch.Tensor]:
    """The weights and arguments that require a gradient; none where gradients are disabled."""
    if not torch.is_grad_enabled():
        return []
    tensors = (*module.parameters(), *(t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)))
    return [t for t in tensors if t.requires_grad]


def without_gradients(asked: list[torch.Tensor], output):
    """The output; backward through it raises where upstream's would have a gradient and it has none.

    A script that only forgot `torch.no_grad` gets the same values as upstream's.
    """
    if not asked:
        return output
    tensors = (t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
    floating = [t for t in tensors if t.is_floating_point() and not t.requires_grad]
    if not floating:
        return output
    marked = dict(zip(map(id, floating), _Refusing.apply(len(asked), *asked, *floating)))
    return tree_map(lambda leaf: marked.get(id(leaf), leaf), output)
