"""diffusers on TPU: the public face. Importing this module imports neither JAX nor torchax and needs no TPU.

What the patched upstream files call says so ("the seam of"); everything else is for users:

    install(pipe)      run this pipeline's models on the TPU        uninstall(pipe)   undo it, the pipeline as it was
    is_active()        is the TPU path in use in this process?      report(pipe)      compilations, seconds, bytes
"""

from .config import ACCELERATORS, TPUConfig, read_environment
from .devices import find_target


__all__ = [
    "TPUConfig",
    "attention_backend",
    "awake",
    "install",
    "is_active",
    "loading",
    "mapped",
    "refuses_quantized",
    "report",
    "takes",
    "uninstall",
    "waiting",
    "waives",
]


def is_active() -> bool:
    """Whether pipelines of this process run on the TPU path (a TPU is here, or `DIFFUSERS_TPU=cpu` simulates one)."""
    return find_target(read_environment()) is not None


def awake():
    """The seam of `import diffusers`: where the path is active, the idioms of scripts for CUDA are answered."""
    if is_active():
        from . import idioms

        idioms.on()


def mapped(device_map):
    """The seam in `DiffusionPipeline.from_pretrained`: (what upstream is to do about `device_map`, is it for the TPU).

    On the TPU path weights are sharded over all chips: "cuda", "auto" and "balanced" ask for just that. "cpu" stays
    upstream's. Raises NotImplementedError for a map by component, before anything is loaded.
    """
    if device_map == "cpu" or not is_active():
        return device_map, False
    if device_map is None or str(device_map).split(":")[0] in (*ACCELERATORS, "auto", "balanced"):
        return None, True
    raise NotImplementedError(
        f"expected device_map None, 'cuda', 'balanced' or 'cpu' on the TPU path, got {device_map!r}: weights are sharded"
        " over all chips, component by component. Leave it out, or set DIFFUSERS_TPU=off."
    )


def takes(*args, **kwargs) -> bool:
    """The seam of `DiffusionPipeline.to` and offloading: whether these arguments name an accelerator that we stand for."""
    device = kwargs.get("device", args[0] if args else None)
    return (isinstance(device, int) or str(device).split(":")[0] in ACCELERATORS) and is_active()


def waives(idiom: str, device="cuda") -> bool:
    """The seam of idioms that have no meaning on a TPU: whether this one is to do nothing, as it is about a device that we
    stand for; says so once."""
    if not takes(device):
        return False
    from .idioms import said

    said.waived(idiom)
    return True


def refuses_quantized(method: str):
    """The seam where a quantizer is made. Raises NotImplementedError on the TPU path for those that need a GPU."""
    if is_active():
        from .idioms import refusing

        refusing.refuse_quantizer(method)


def loading(load, device_map=None):
    """The seam where a pipeline loads a model: a `from_pretrained` that names missing weights in an error.

    It raises NotImplementedError for quantization that needs a GPU.
    """
    if not is_active():
        return load
    from . import checkpoint
    from .idioms import refusing

    return refusing.before_loading(load if device_map is not None else checkpoint.checked(load))


def waiting(tensor):
    """The seam where a model takes a checkpoint's tensor: conversions to another dtype wait until its values are needed."""
    if not is_active():
        return tensor
    from . import checkpoint

    return checkpoint.waiting(tensor)


def attention_backend(name: str) -> str:
    """The seam where a name becomes an attention backend: on the TPU path those of packages for GPUs mean our kernel."""
    name = getattr(name, "value", name)
    if name == "native" or name.startswith("tpu") or not is_active():
        return name
    from .idioms import said

    said.once(
        "attention_backend",
        f"attention backend {name!r}: on the TPU path attention is the TPU kernel, whatever backend",
    )
    return "native"


def install(pipeline, config: TPUConfig | None = None):
    """Route the models of one pipeline instance through JAX and return the same instance. See `pipeline.install`."""
    from . import pipeline as room

    return room.install(pipeline, config)


def uninstall(pipeline):
    """Undo `install` on this instance: upstream's class, upstream's forwards, weights on the host."""
    from . import pipeline as room

    return room.uninstall(pipeline)


def report(pipeline) -> dict:
    """What was compiled for this pipeline so far, by component and entry point. See `pipeline.report`."""
    from . import pipeline as room

    return room.report(pipeline)
