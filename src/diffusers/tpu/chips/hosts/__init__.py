# ruff: noqa: F401
"""Runs of several processes, one per host, which `jax.distributed` connects.

Every process runs the same script with the same arguments; the mesh determines each one's share of a call. Importing this package
does not import JAX, and a run of one process does nothing here.
"""

from .agreement import agree, alike, of_first, same
from .arrays import put, whole
from .run import join, number, process_count
from .watch import failed
