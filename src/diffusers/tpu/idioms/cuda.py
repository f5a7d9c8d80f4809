"""`torch.cuda` and `torch.accelerator` on the TPU path: one device, which is all chips together."""

import contextlib
import types
from dataclasses import dataclass

import torch

from . import chips
from .replacing import Replacements
from .streams import Event, Guard, Stream


CAPABILITY = (8, 0)  # bfloat16, and no 8-bit floats: what scripts decide by it
_peak = chips.Peak()


@dataclass(frozen=True)
class Properties:
    """As `torch.cuda.get_device_properties`: `multi_processor_count` is the number of chips."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    warp_size: int = 32
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    gcnArchName: str = ""  # what torch.compile asks for where torch was built without CUDA


def _properties(device=None) -> Properties:
    return Properties(chips.name(), chips.bytes_in_all(), len(chips.devices()))


def _memory(device=None) -> tuple[int, int]:
    total = chips.bytes_in_all()
    return max(0, total - chips.bytes_in_use()), total


def _stats(device=None) -> dict[str, int]:
    used, peak = chips.bytes_in_use(), _peak.bytes()
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
    return {f"{kind}.all.{time}": n for kind in kinds for time, n in (("current", used), ("peak", peak))}


def _summary(device=None, abbreviated=False) -> str:
    used, peak, total = map(chips.gib, (chips.bytes_in_use(), _peak.bytes(), chips.bytes_in_all()))
    return f"{chips.name()}, {len(chips.devices())} chips: {used} in use, {peak} at the peak, of {total}"


def _seed(seed):
    """Draws on an accelerator are the CPU generator's."""
    torch.default_generator.manual_seed(int(seed))


def _state(device=None):
    return torch.get_rng_state()


def _set_state(state, device=None):
    torch.set_rng_state(state)


def _gives(value):
    return lambda *args, **kwargs: value


def _wait(device=None):
    chips.wait()


def _allocated(device=None) -> int:
    return chips.bytes_in_use()


def _highest(device=None) -> int:
    return _peak.bytes()


def _reset(device=None):
    _peak.reset()


_nothing = _gives(None)
_MEMORY = {
    "memory_allocated": _allocated,
    "memory_reserved": _allocated,
    "max_memory_allocated": _highest,
    "max_memory_reserved": _highest,
    "reset_peak_memory_stats": _reset,
    "reset_accumulated_memory_stats": _reset,
    "memory_stats": _stats,
    "empty_cache": _nothing,
}
CUDA = {
    **_MEMORY,
    "is_available": _gives(True),
    "is_initialized": _gives(True),
    "init": _nothing,
    "device_count": _gives(1),
    "current_device": _gives(0),
    "set_device": _nothing,
    "get_device_name": lambda device=None: chips.name(),
    "get_device_properties": _properties,
    "get_device_capability": _gives(CAPABILITY),
    "get_arch_list": _gives([]),
    "can_device_access_peer": _gives(False),
    "is_bf16_supported": _gives(True),
    "is_tf32_supported": _gives(False),
    "is_current_stream_capturing": _gives(False),
    "mem_get_info": _memory,
    "memory_cached": _allocated,
    "max_memory_cached": _highest,
    "reset_max_memory_allocated": _reset,
    "reset_max_memory_cached": _reset,
    "device_memory_used": _allocated,
    "memory_summary": _summary,
    "set_per_process_memory_fraction": _nothing,
    "ipc_collect": _nothing,
    "synchronize": _wait,
    "manual_seed": _seed,
    "manual_seed_all": _seed,
    "seed": lambda: _seed(torch.seed()),
    "seed_all": lambda: _seed(torch.seed()),
    "initial_seed": lambda: torch.initial_seed(),
    "get_rng_state": _state,
    "get_rng_state_all": lambda: [_state()],
    "set_rng_state": _set_state,
    "set_rng_state_all": lambda states: _set_state(states[0]),
    "device": Guard,
    "device_of": Guard,
    "Event": Event,
    "Stream": Stream,
    "ExternalStream": Stream,
    "StreamContext": Guard,
    "stream": lambda stream=None: Guard(),
    "set_stream": _nothing,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    **{
        f"{kind}Tensor": getattr(torch, f"{kind}Tensor")
        for kind in ("Float", "Half", "BFloat16", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")
    },
}
ACCELERATOR = {
    **_MEMORY,
    "is_available": _gives(True),
    "device_count": _gives(1),
    "current_accelerator": _gives(torch.device("cuda")),
    "current_device_index": _gives(0),
    "current_device_idx": _gives(0),
    "set_device_index": _nothing,
    "set_device_idx": _nothing,
    "device_index": Guard,
    "synchronize": _wait,
    "current_stream": lambda device=None: Stream(),
    "set_stream": _nothing,
    "get_memory_info": _memory,
}
NVTX = {
    "range_push": _gives(0),
    "range_pop": _gives(0),
    "range_start": _gives(0),
    "range_end": _nothing,
    "mark": _nothing,
    "range": lambda *args, **kwargs: contextlib.nullcontext(),
}
PROFILER = {"start": _nothing, "stop": _nothing, "profile": contextlib.nullcontext}


def replace(replacements: Replacements):
    """Put what this file has in torch's place."""
    places = [
        (torch.cuda, CUDA),
        (torch.cuda.memory, CUDA),
        (torch.cuda.random, CUDA),
        (torch.cuda.streams, CUDA),
        (torch.cuda.nvtx, NVTX),
        (torch.cuda.profiler, PROFILER),
        (torch.accelerator, ACCELERATOR),
        (torch.accelerator.memory, ACCELERATOR),
    ]
    own: dict[tuple[int, str], object] = {}
    for module, functions in places:
        for name, function in functions.items():
            if name in vars(module):
                replacements.put(module, name, own.setdefault((id(functions), name), _of_its_own(name, function)))


def _of_its_own(name: str, function):
    """The function as another object, under its name: torch's compiler tells functions apart."""
    if not isinstance(function, types.FunctionType):
        return function
    return types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
