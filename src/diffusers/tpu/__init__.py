"""The public face of diffusers on TPU. Importing it imports neither JAX nor torchax and needs no TPU.

For users, of a pipeline or of a model by itself:

    install(pipe)      run its models on the TPU                    uninstall(pipe)   undo it, the pipeline as it was
    is_active()        is the TPU path in use in this process?      report(pipe)      compilations, seconds, bytes
    is_main_process()  of several hosts, the one that writes?       explain(pipe)     what was compiled, and why not

The other functions are called by the patched upstream files.
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
    """Called by `import diffusers`: if the TPU path is active, replaces what scripts for CUDA call."""
    if is_active():
        from . import idioms
        from .pipelines import moving

        idioms.on(moving)  # applied last: it moves models and leaves other moves to torch


def resolve_device_map(device_map):
    """Called by `DiffusionPipeline.from_pretrained`: (the `device_map` that upstream uses, whether the pipeline is for the TPU).

    Raises before anything is loaded: NotImplementedError for a map by component, ValueError if the environment's mesh does not
    fit the chips, and JAX's own error if it cannot open the chips.
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
    """Called by `DiffusionPipeline.to` and offloading: whether these arguments name an accelerator that means the TPU."""
    device = kwargs.get("device", args[0] if args else None)
    return names_accelerator(device) and is_active()


def ignore_idiom(idiom: str, device="cuda") -> bool:
    """Called by functions that have no meaning on a TPU: whether this one does nothing for this device; warns once."""
    if not handles_device(device):
        return False
    notices.warn_once(idiom)
    return True


def refuses_quantized(method: str):
    """Called where a quantizer is made. Raises NotImplementedError on the TPU path for those that need a GPU."""
    if is_active():
        from .idioms import refusing

        refusing.refuse_quantizer(method)


def loading(load, device_map=None):
    """Called where a pipeline loads a model: `load`, which on the TPU path refuses missing weights and quantization for GPUs."""
    if not is_active():
        return load
    from .idioms import refusing
    from .weights import checkpoint

    return refusing.before_loading(load if device_map is not None else checkpoint.checked(load))


def waiting(tensor):
    """Called where a model takes a checkpoint's tensor: conversions of its dtype are deferred until its values are needed."""
    if not is_active():
        return tensor
    from .weights import checkpoint

    return checkpoint.waiting(tensor)


def tensors_of(path, device):
    """Called where a model's safetensors file is opened: its tensors by name, mapped and not read; None: upstream reads it."""
    if not is_active():
        return None
    from .weights import disk

    return disk.load_file(path, device)


def attention_backend(name: str) -> str:
    """Called where a name becomes an attention backend: on the TPU path, backends of GPU packages mean the TPU kernel."""
    name = getattr(name, "value", name)
    if name == "native" or name.startswith("tpu") or not is_active():
        return name
    sentence = f"attention backend {name!r}: on the TPU path attention is the TPU kernel, whatever backend"
    notices.warn_once("attention_backend", sentence)
    return "native"


def rotated(x, *how):
    """Called by `apply_rotary_emb`: its result on the TPU path; None: upstream computes it."""
    if not type(x).__module__.startswith(("torchax.", f"{__name__}.bridge.")):
        return None
    from . import bridge

    return bridge.rotated(x, *how)


def install(model_or_pipeline, config: TPUConfig | None = None):
    """Route one pipeline's models, or one model, through JAX; returns the same instance. See `pipeline`, `attach`.

    Raises TypeError for any other object, and for a `config` that is no TPUConfig.
    """
    if config is not None and not isinstance(config, TPUConfig):
        raise TypeError(f"expected a TPUConfig, such as TPUConfig(mesh=(2, 4, 1)), got {config!r}")
    return _room(model_or_pipeline).install(model_or_pipeline, config)


def uninstall(model_or_pipeline):
    """Undo `install` on this instance: upstream's class, upstream's methods, weights on the host."""
    return _room(model_or_pipeline).uninstall(model_or_pipeline)


def report(model_or_pipeline) -> dict:
    """The programs compiled so far, for a pipeline by component. See `pipeline.report` and `attach.report`."""
    return _room(model_or_pipeline).report(model_or_pipeline)


def explain(model_or_pipeline) -> str:
    """Which modules were compiled, which were not, and why, with upstream's lines, as text. See `compile/explain.py`."""
    return _room(model_or_pipeline).explain(model_or_pipeline)


def _room(model_or_pipeline):
    import torch

    from .pipelines import attach, pipeline

    if isinstance(model_or_pipeline, torch.nn.Module):
        return attach
    if not hasattr(type(model_or_pipeline), "components"):
        raise TypeError(f"expected a pipeline or a model, an instance, got {model_or_pipeline!r}"[:300])
    return pipeline
