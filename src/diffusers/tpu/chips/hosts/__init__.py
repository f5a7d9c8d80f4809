# ruff: noqa: F401
"""Several processes that make one run, a process for each host: JAX's own runtime brings them together (`jax.distributed`).

Every process runs the same script on the same arguments; what each does of a call JAX knows by the mesh. Importing this room
imports no JAX, and a run of one process does nothing here.
"""

from .agreement import agree, alike, of_first, same
from .arrays import put, whole
from .run import join, number, process_count
from .watch import failed
