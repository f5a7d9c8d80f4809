"""`torch.distributed` on the TPU path, for scripts that start a process per GPU: here one process uses all chips of a host.

An NCCL process group becomes a gloo group, as all tensors of a script are host tensors. A group of one process needs no launcher.
"""

import math
import os

import torch

from ..common.config import names_accelerator
from ..common.notices import warn_once
from .replacing import Replacements


ALONE = "one process has all chips of this host, and splits models over them by TPUConfig(mesh=(dp, sp, tp))"
INSTEAD = "start one process, with python script.py or with torchrun --nproc-per-node 1 script.py"


def replace(replacements: Replacements):
    if not torch.distributed.is_available():
        return
    from torch.distributed import device_mesh, distributed_c10d

    for owner, name, call in (
        (distributed_c10d, "init_process_group", _initialised),
        (distributed_c10d, "new_group", _grouped),
        (device_mesh, "init_device_mesh", _meshed),
    ):
        replacements.wrap(owner, name, call)
        replacements.put(torch.distributed, name, vars(owner)[name])
    for owner in (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
        replacements.wrap(owner, "__init__", _wrapped)
    # For `barrier` and groups without a backend: torch's own raises once torchax is imported, whose device has no hooks.
    replacements.wrap(torch._C, "_get_accelerator", lambda *args: torch.device("cpu"))


def refuse_several():
    """Raises RuntimeError in one of several processes of this host: each would open all of its chips."""
    here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if here.isdecimal() and int(here) > 1:
        raise RuntimeError(f"expected one process for the chips of this host, got one of {here}: {ALONE}; {INSTEAD}")


def _of_accelerators(backend) -> bool:
    return backend is None or "nccl" in str(backend).lower()


def _initialised(original, backend=None, *args, **kwargs):
    if not _of_accelerators(backend):
        return original(backend, *args, **kwargs)
    refuse_several()
    kwargs.pop("device_id", None)
    size = kwargs.get("world_size", -1)
    size = int(os.environ.get("WORLD_SIZE", 1)) if size == -1 else size
    if size > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        raise RuntimeError(f"expected world_size 1 on the TPU path, got {size}: {ALONE}; {INSTEAD}")
    if size == 1:
        args, kwargs = (), {name: x for name, x in kwargs.items() if name in ("timeout", "group_name")}
        kwargs |= {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    sentence = f"torch.distributed with NCCL: on the TPU path {ALONE}; the process group is gloo's, of size {size}"
    warn_once("distributed", sentence)
    return original("gloo", *args, **kwargs)


def _grouped(original, ranks=None, timeout=None, backend=None, *args, **kwargs):
    kwargs.pop("device_id", None)
    return original(ranks, timeout, None if _of_accelerators(backend) else backend, *args, **kwargs)


def _wrapped(init, parallel, module, device_ids=None, output_device=None, *args, **kwargs):
    init(parallel, module, None, None, *args, **kwargs)
    parallel.device_ids = None  # DataParallel would list all devices, and expect the weights on them


def _meshed(original, device_type, mesh_shape, **kwargs):
    if not names_accelerator(device_type):
        return original(device_type, mesh_shape, **kwargs)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
    if math.prod(mesh_shape) > torch.distributed.get_world_size():
        raise RuntimeError(f"expected a mesh of one process on the TPU path, got {tuple(mesh_shape)}: {ALONE}")
    return original("cpu", mesh_shape, **kwargs)
