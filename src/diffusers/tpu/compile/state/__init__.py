"""What a trace of a module reads beside the call's arguments: part of the cache key, compared before each call, restored after it.

`State.key` has attributes, hooks, processors, classes and what the user's code names; LoRA scales are arguments (`State.numbers`).
No program is made of what Python cannot read (`State.unread`) or a trace changes for good (`Trace.persistent`).
"""

from .arguments import Arguments, InputRef, OutputRef, Written, is_data, opened, write_back
from .key import Unread, is_entry, of_object, own_forward, process_key, read, signature
from .libraries import Module, class_version
from .state import Held, State, Trace, undone, without_caches
