"""What a trace of a module reads beside the call's arguments: part of the cache key, compared before each call, restored after a trace.

Attributes, hooks, processors, classes and what the user's code names are in `State.key`; scales of LoRA layers are arguments
(`State.numbers`). What Python cannot read is in `State.unread`, what a trace changes for good in `Trace.persistent`: no program then.
"""

from .arguments import Arguments, InputRef, OutputRef, Written, is_data, opened, write_back
from .key import Unread, is_entry, of_object, own_forward, process_key, read, signature
from .libraries import Module, class_version
from .state import Held, State, Trace, undone, without_caches
