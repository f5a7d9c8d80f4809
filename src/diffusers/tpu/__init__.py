"""diffusers on TPU: the public face. Importing this module imports neither JAX nor torchax and needs no TPU.

`loaded` and `takes` are what the patched upstream files call; everything else is for users:

    install(pipe)      run this pipeline's models on the TPU        uninstall(pipe)   undo it, the pipeline as it was
    is_active()        is the TPU path in use in this process?      report(pipe)      compilations, seconds, bytes
"""

from .config import TPUConfig, read_environment
from .devices import find_target


__all__ = ["TPUConfig", "install", "is_active", "loaded", "report", "takes", "uninstall"]

_ACCELERATORS = ("cuda", "tpu", "xla", "jax")


def is_active() -> bool:
    """Whether pipelines of this process run on the TPU path (a TPU is here, or `DIFFUSERS_TPU=cpu` simulates one)."""
    return find_target(read_environment()) is not None


def loaded(pipeline, device_map=None):
    """The seam at the end of `DiffusionPipeline.from_pretrained`: the same pipeline, on the TPU path if that is active.

    A `device_map` is upstream's own placement over CUDA devices and cannot be combined with ours.
    """
    if not is_active():
        return pipeline
    if device_map is not None:
        raise NotImplementedError(
            f"expected no `device_map` on the TPU path, got {device_map!r}: weights are sharded over all chips without"
            " it. Leave it out, or set DIFFUSERS_TPU=off."
        )
    return install(pipeline)


def takes(*args, **kwargs) -> bool:
    """The seam at the start of `DiffusionPipeline.to`: whether these arguments name an accelerator that we stand for."""
    device = kwargs.get("device", args[0] if args else None)
    return (isinstance(device, int) or str(device).split(":")[0] in _ACCELERATORS) and is_active()


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
