"""One call of a module: what a trace of it reads beside its arguments, written down, compared before each call, put back after a trace.

A program is keyed by everything that its trace read:

| a trace reads | answer |
|---|---|
| attributes of every submodule, also in dicts, lists and objects; hooks, processors, configurations | `State.key` |
| `training`, a `forward` put on an instance, another class, hooks, methods replaced on a class or in a module of upstream's | `State.key` |
| what code of the user's names: globals, closures, modules, classes, slots, context variables, the environment | `State.key`; followed from the hooks, processors and methods that a forward may reach |
| arrays and tensors that are plain attributes | constants of the program: their bytes are in `State.key`, and compared before each call |
| LoRA layers | what they add: a term for each active adapter, by its place; scales are arguments (`State.numbers`): a changed one compiles nothing |
| what hooks of caches keep from call to call, where `tracing.kept_by` knows them | arguments and results of the program |
| names, shapes and dtypes of parameters and buffers | the key, by `weights`; their values are arguments |
| objects among the arguments of a call | taken apart (`arguments`): tensors are arguments, the rest is a part of the call's key |
| the process's attention backend, torch's default dtype | `process_key` |
| what a forward writes: attributes (a VAE's feature cache), hooks that it installs | put back after the trace (`undone`) |
| what it writes there and the next call reads | no program can: `tracing.depends_on_previous_call` finds it, the module runs eagerly |
| what hooks, processors or counters keep from call to call | no program can: the module runs eagerly (`Trace.persistent`) |
| iterators, files, clocks, caches of functions, objects whose state Python cannot read | no program can: `State.unread`, the module runs eagerly |
| parameters and buffers that a forward writes into | no program can: the module runs eagerly (`tracing.WeightWritten`) |
| `functools.lru_cache` on upstream's classes and functions | bypassed during a trace: they would keep tracers |
| random numbers of torch, Python or numpy | no program draws any: the module runs eagerly, and draws what it would |
| autocast, `torch.backends` (TF32 and the like), gradient and inference mode | never: models compute in their own dtype, `TPUConfig` has precisions |
| values of a call's small inputs that its lines ask for | a further part of the key: `decided` |
"""

from .arguments import Arguments, InputRef, OutputRef, Written, opened, write_back
from .key import Unread, is_entry, of_object, own_forward, process_key, read, signature
from .libraries import Module, class_version
from .state import Entry, Held, Number, State
from .undo import Trace, undone, without_caches


__all__ = [
    "Arguments",
    "Entry",
    "Held",
    "InputRef",
    "Module",
    "Number",
    "OutputRef",
    "State",
    "Trace",
    "Unread",
    "Written",
    "class_version",
    "is_entry",
    "of_object",
    "opened",
    "own_forward",
    "process_key",
    "read",
    "signature",
    "undone",
    "without_caches",
    "write_back",
]
