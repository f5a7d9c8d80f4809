"""`torch.cuda` and `torch.accelerator` on the TPU path: one device, which is all chips together."""

import contextlib
import types

import torch

from ..chips.figures import GIB
from ..common.config import names_accelerator
from . import chips
from .chips import Event, Guard, NoGraph, Stream
from .replacing import Replacements


CAPABILITY = (8, 0)  # from which scripts infer: bfloat16, but no 8-bit floats
_peak = chips.Peak()


def _properties(device=None) -> types.SimpleNamespace:
    """As `torch.cuda.get_device_properties`: `multi_processor_count` is the number of chips."""
    asked = {"name": chips.name(), "total_memory": chips.bytes_in_all(), "multi_processor_count": len(chips.devices())}
    # torch.compile reads the last one where torch was built without CUDA.
    fixed = {"warp_size": 32, "is_integrated": False, "is_multi_gpu_board": False, "gcnArchName": ""}
    return types.SimpleNamespace(**asked, major=CAPABILITY[0], minor=CAPABILITY[1], **fixed)


def _memory(device=None) -> tuple[int, int]:
    total = chips.bytes_in_all()
    return max(0, total - chips.bytes_in_use()), total


def _nested(device=None) -> dict[str, dict]:
    bytes_of_all = {"current": chips.bytes_in_use(), "peak": _peak.bytes()}
    return {kind: {"all": {**bytes_of_all}} for kind in ("allocated_bytes", "reserved_bytes", "active_bytes")}


def _summary(device=None, abbreviated=False) -> str:
    sizes = chips.bytes_in_use(), _peak.bytes(), chips.bytes_in_all()
    used, peak, total = (f"{size / GIB:.2f} GiB" for size in sizes)
    return f"{chips.name()}, {len(chips.devices())} chips: {used} in use, {peak} at the peak, of {total}"


def _seed(seed):
    """Draws on an accelerator use the CPU generator."""
    torch.default_generator.manual_seed(int(seed))


def _unread(device=None):
    raise NotImplementedError(
        "expected no reading of a GPU's sensors on the TPU path: leave it out; `tpu-info` shows how busy the chips are"
    )


def _profiled(init, profile, *args, use_cuda=False, use_device=None, **kwargs):
    if use_cuda or names_accelerator(use_device):
        use_device, kwargs["use_cpu"] = None, True
    init(profile, *args, use_device=use_device, **kwargs)


def _gives(value=None):
    return lambda *args, **kwargs: value


def _named(names: str, function) -> dict:
    return dict.fromkeys(names.split(), function)


_wait, _allocated, _highest, _reset = (
    lambda device=None: chips.wait(),
    lambda device=None: chips.bytes_in_use(),
    lambda device=None: _peak.bytes(),
    lambda device=None: _peak.reset(),
)
_BOTH = {
    **_named("memory_allocated memory_reserved", _allocated),
    **_named("max_memory_allocated max_memory_reserved", _highest),
    **_named("reset_peak_memory_stats reset_accumulated_memory_stats", _reset),
    **_named("empty_cache set_stream reset_peak_host_memory_stats reset_accumulated_host_memory_stats", _gives()),
    "memory_stats": torch.cuda.memory_stats,  # flattens `memory_stats_as_nested_dict`
    "is_available": _gives(True),
    "device_count": _gives(1),
    "synchronize": _wait,
    "current_stream": lambda device=None: Stream(),
}
CUDA = {
    **_BOTH,
    **_named("init set_device set_per_process_memory_fraction set_sync_debug_mode ipc_collect", _gives()),
    **_named("is_initialized is_bf16_supported", _gives(True)),
    **_named("can_device_access_peer is_tf32_supported is_current_stream_capturing", _gives(False)),
    **_named("current_device get_sync_debug_mode", _gives(0)),
    "get_per_process_memory_fraction": _gives(1.0),
    "get_allocator_backend": _gives("native"),
    **_named("host_memory_stats host_memory_stats_as_nested_dict", _gives({})),
    "memory_stats_as_nested_dict": _nested,
    **_named("utilization memory_usage temperature power_draw clock_rate", _unread),
    "get_device_name": lambda device=None: chips.name(),
    "get_device_properties": _properties,
    "get_device_capability": _gives(CAPABILITY),
    **_named("get_arch_list memory_snapshot", _gives([])),
    "mem_get_info": _memory,
    **_named("memory_cached device_memory_used", _allocated),
    "max_memory_cached": _highest,
    **_named("reset_max_memory_allocated reset_max_memory_cached", _reset),
    "memory_summary": _summary,
    **_named("manual_seed manual_seed_all", _seed),
    **_named("seed seed_all", lambda: _seed(torch.seed())),
    "initial_seed": lambda: torch.initial_seed(),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    **_named("device device_of StreamContext", Guard),
    "stream": lambda stream=None: Guard(),
    "Event": Event,
    **_named("CUDAGraph graph graph_pool_handle", NoGraph),
    "make_graphed_callables": lambda *args, **kwargs: NoGraph(),
    **_named("Stream ExternalStream", Stream),
    "default_stream": lambda device=None: Stream(),
    **{
        f"{kind}Tensor": getattr(torch, f"{kind}Tensor")
        for kind in ("Float", "Half", "BFloat16", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")
    },
}
ACCELERATOR = {
    **_BOTH,
    "current_accelerator": _gives(torch.device("cuda")),
    **_named("current_device_index current_device_idx", _gives(0)),
    **_named("set_device_index set_device_idx empty_host_cache", _gives()),
    "device_index": Guard,
    "get_memory_info": _memory,
}
NVTX = {
    **_named("range_push range_pop range_start", _gives(0)),
    **_named("range_end mark", _gives()),
    "range": lambda *args, **kwargs: contextlib.nullcontext(),
}
PROFILER = {**_named("start stop", _gives()), "profile": contextlib.nullcontext}


def replace(replacements: Replacements):
    cuda, accelerator, own = torch.cuda, torch.accelerator, {}
    for modules, functions in (
        ((cuda, cuda.memory, cuda.random, cuda.streams), CUDA),
        ((cuda.nvtx,), NVTX),
        ((cuda.profiler,), PROFILER),
        ((accelerator, accelerator.memory), ACCELERATOR),
    ):
        for name, function in functions.items():
            for module in modules:
                if name in vars(module):
                    replacements.put(module, name, own.setdefault((id(functions), name), _of_its_own(name, function)))
    replacements.wrap(torch.autograd.profiler.profile, "__init__", _profiled)


def _of_its_own(name: str, function):
    """A copy of the function under this name: torch's compiler needs distinct objects."""
    if not isinstance(function, types.FunctionType):
        return function
    defaults, closure = function.__defaults__, function.__closure__
    return types.FunctionType(function.__code__, function.__globals__, name, defaults, closure)
