"""Several processes that make one run, a process for each host: JAX's own runtime brings them together (`jax.distributed`).

Every process runs the same script on the same arguments; what each does of a call JAX knows by the mesh. Importing this room
imports no JAX, and a run of one process does nothing here.

| file | |
|---|---|
| `run` | which processes there are; joined before JAX's first device is asked for |
| `agreement` | what all of them must have alike is compared, what they draw is the first one's |
| `watch` | one that ends takes the others with it, and they say which and why |
| `arrays` | values onto a mesh of several processes, and back |
"""

from .agreement import agree, alike, of_first, same
from .arrays import put, whole
from .run import is_main, join, joined, number, process_count
from .watch import failed


__all__ = [
    "agree",
    "alike",
    "failed",
    "is_main",
    "join",
    "joined",
    "number",
    "of_first",
    "process_count",
    "put",
    "same",
    "whole",
]
