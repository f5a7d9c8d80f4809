"""A disk cache of the compiler's results: the same program is traced again, but not compiled again.

The cache key is a program's text with the names of its operations (which `timing` reads), but without source files and lines.
So moved code, or a change in how programs are read, does not compile anything again.
"""

import hashlib
import importlib.metadata
import json
from dataclasses import asdict, fields

from jax.sharding import Mesh

from ..compile.store.disk_cache import DiskCache
from .aot import CompiledProgram, Compiler, OutOfMemory


def compiled(compiler: Compiler, lowered, mesh: Mesh, options: dict | None = None) -> CompiledProgram:
    """`compiler.compile(lowered, options)`, cached, as is its OutOfMemory. `mesh`: the program's, of the compiler's chips."""
    cache = DiskCache.of("programs")
    kinds = [field.name for field in fields(CompiledProgram)]
    name = _digest(" ".join([compiler.flags, *kinds]), compiler, lowered, mesh, options)
    if (found := cache.find(name)) is None:
        try:
            found = asdict(compiler.compile(lowered, options))
        except OutOfMemory as error:
            found = (str(error), error.asked, error.limit)
        cache.keep(name, found)
    if isinstance(found, tuple):
        raise OutOfMemory(*found)
    return CompiledProgram(**found)


def name_of(compiler: Compiler, lowered, mesh: Mesh, options: dict | None = None) -> str:
    """A program's name: a digest of all that determines the compiler's result, the same with and without schedules."""
    return _digest(compiler.asked_flags, compiler, lowered, mesh, options)


def _digest(flags: str, compiler: Compiler, lowered, mesh: Mesh, options: dict | None) -> str:
    said = [
        *(importlib.metadata.version(name) for name in ("jaxlib", "libtpu")),
        flags,
        compiler.topology.name,
        [device.id for device in mesh.devices.flat],
        sorted((options or {}).items()),
        lowered.as_text(debug_info=True),
    ]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
