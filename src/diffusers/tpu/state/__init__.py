"""What a trace of a module reads beside its arguments: written down, compared before each call, put back after a trace.

A program is keyed by everything its trace read:

| a trace reads | answer |
|---|---|
| attributes of every submodule, also in dicts and lists, of processors, hooks, configurations, closures of functions | `State.key` |
| `training`, a `forward` put on an instance, hooks of torch, transformers and diffusers, methods replaced on a class | `State.key` |
| LoRA layers | what they add: a term for each active adapter, by its place; scales are arguments (`State.numbers`): a changed one compiles nothing |
| what hooks of caches keep from call to call, where `bridge.kept_by` knows them | arguments and results of the program |
| names, shapes and dtypes of parameters and buffers | the key, by `weights`; their values are arguments |
| tensors that are plain attributes | constants of the program: which tensor, and its version, are in `State.key` |
| the process's attention backend, torch's default dtype | `process_key` |
| what a forward writes: attributes (a VAE's feature cache), hooks that it installs | put back after the trace (`undone`) |
| what it writes there and the next call reads | no program can: `bridge.look_after` finds it, the module runs eagerly |
| what hooks, processors or counters keep from call to call | no program can: the module runs eagerly (`Trace.lasting`) |
| what classes hold, and names of the script that the user's methods read | no part of the key; written, as what hooks keep |
| parameters and buffers that a forward writes into | no program can: the module runs eagerly (`bridge.WeightWritten`) |
| `functools.lru_cache` on upstream's classes and functions | bypassed during a trace: they would keep tracers |
| random numbers | no program draws any: the module runs eagerly, and torch's CPU stream is drawn from |
| autocast, `torch.backends` (TF32 and the like), gradient and inference mode | never: models compute in their own dtype, `TPUConfig` has precisions |
| values of a call's small inputs that its lines ask for | a further part of the key: `decided` |
| environment variables | upstream reads them when it is imported |
"""

from .reading import Entry, Held, Number, State, class_version, is_entry, own_forward, process_key, read, signature
from .tracing import Trace, undone, without_caches


__all__ = [
    "Entry",
    "Held",
    "Number",
    "State",
    "Trace",
    "class_version",
    "is_entry",
    "own_forward",
    "process_key",
    "read",
    "signature",
    "undone",
    "without_caches",
]
