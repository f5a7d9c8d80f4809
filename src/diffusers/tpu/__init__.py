"""The public face of diffusers on TPU. Importing it imports neither JAX nor torchax and needs no TPU.

For users, of a pipeline or of a model by itself:

    install(pipe)      run its models on the TPU                    uninstall(pipe)   undo it, the pipeline as it was
    is_active()        is the TPU path in use in this process?      report(pipe)      compilations, seconds, bytes
    is_main_process()  of several hosts, the one that writes?       explain(pipe)     what was compiled, and why not

The rest is what the patched upstream files call.
"""

from .chips import hosts
from .chips.devices import find_target, is_active
from .common import notices
from .common.config import ACCELERATORS, TPUConfig, names_accelerator, read_environment


__all__ = ["TPUConfig", "explain", "install", "is_active", "is_main_process", "report", "uninstall"]


def is_main_process() -> bool:
    """Whether this process writes results: the only one, or the first of a run on several hosts. See `hosts`."""
    target = find_target(read_environment())
    return target is None or hosts.number(target.platform) == 0


def activate():
    """The seam of `import diffusers`: where the path is active, the idioms of scripts for CUDA are answered."""
    if is_active():
        from . import idioms
        from .pipelines import moving

        idioms.on(moving)  # last: models move, what is left of a move is torch's


def resolve_device_map(device_map):
    """The seam in `DiffusionPipeline.from_pretrained`: (what upstream is to do about `device_map`, is it for the TPU).

    Before anything is loaded it raises NotImplementedError for a map by component, ValueError for a mesh of the environment that
    does not fit the chips, and what JAX says of chips that it cannot have.
    """
    if device_map == "cpu" or not is_active():
        return device_map, False
    if device_map is None or str(device_map).split(":")[0] in (*ACCELERATORS, "auto", "balanced"):
        from .pipelines.attach import resolved, target_devices

        resolved(None, target_devices(), {})
        return None, True
    raise NotImplementedError(
        f"expected device_map None, 'cuda', 'balanced' or 'cpu' on the TPU path, got {device_map!r}: weights are sharded"
        " over all chips, component by component. Leave it out, or set DIFFUSERS_TPU=off."
    )


def handles_device(*args, **kwargs) -> bool:
    """The seam of `DiffusionPipeline.to` and offloading: whether these arguments name an accelerator that we stand for."""
    device = kwargs.get("device", args[0] if args else None)
    return names_accelerator(device) and is_active()


def ignore_idiom(idiom: str, device="cuda") -> bool:
    """The seam of idioms that have no meaning on a TPU: whether this one, about this device, is to do nothing; warns once."""
    if not handles_device(device):
        return False
    notices.warn_once(idiom)
    return True


def refuses_quantized(method: str):
    """The seam where a quantizer is made. Raises NotImplementedError on the TPU path for those that need a GPU."""
    if is_active():
        from .idioms import refusing

        refusing.refuse_quantizer(method)


def loading(load, device_map=None):
    """The seam where a pipeline loads a model: a `from_pretrained` that refuses missing weights, and quantization for GPUs."""
    if not is_active():
        return load
    from .idioms import refusing
    from .weights import checkpoint

    return refusing.before_loading(load if device_map is not None else checkpoint.checked(load))


def waiting(tensor):
    """The seam where a model takes a checkpoint's tensor: conversions to another dtype wait until its values are needed."""
    if not is_active():
        return tensor
    from .weights import checkpoint

    return checkpoint.waiting(tensor)


def tensors_of(path, device):
    """The seam where a model's safetensors file is opened: its tensors by name, mapped and not read; None: as upstream does."""
    if not is_active():
        return None
    from .weights import disk

    return disk.load_file(path, device)


def attention_backend(name: str) -> str:
    """The seam where a name becomes an attention backend: on the TPU path those of packages for GPUs mean our kernel."""
    name = getattr(name, "value", name)
    if name == "native" or name.startswith("tpu") or not is_active():
        return name
    sentence = f"attention backend {name!r}: on the TPU path attention is the TPU kernel, whatever backend"
    notices.warn_once("attention_backend", sentence)
    return "native"


def rotated(x, *how):
    """The seam of `apply_rotary_emb`: what it gives of x on the TPU path; None: as upstream does it."""
    if not type(x).__module__.startswith(("torchax.", f"{__name__}.bridge.")):
        return None
    from . import bridge

    return bridge.rotated(x, *how)


def install(model_or_pipeline, config: TPUConfig | None = None):
    """Route one pipeline's models, or one model, through JAX; returns the same instance. See `pipeline`, `attach`.

    Raises TypeError for what is neither, and for a `config` that is no TPUConfig.
    """
    if config is not None and not isinstance(config, TPUConfig):
        raise TypeError(f"expected a TPUConfig, such as TPUConfig(mesh=(2, 4, 1)), got {config!r}")
    return _room(model_or_pipeline).install(model_or_pipeline, config)


def uninstall(model_or_pipeline):
    """Undo `install` on this instance: upstream's class, upstream's methods, weights on the host."""
    return _room(model_or_pipeline).uninstall(model_or_pipeline)


def report(model_or_pipeline) -> dict:
    """What was compiled so far, of a pipeline by component. See `pipeline.report` and `attach.report`."""
    return _room(model_or_pipeline).report(model_or_pipeline)


def explain(model_or_pipeline) -> str:
    """Which modules were compiled, which not, and why, with upstream's lines: in lines of text. See `ladder`."""
    return _room(model_or_pipeline).explain(model_or_pipeline)


def _room(model_or_pipeline):
    import torch

    from .pipelines import attach, pipeline

    if isinstance(model_or_pipeline, torch.nn.Module):
        return attach
    if not hasattr(type(model_or_pipeline), "components"):
        raise TypeError(f"expected a pipeline or a model, an instance, got {model_or_pipeline!r}"[:300])
    return pipeline
