"""What the compiler made of a program, kept on disk: who asks for the same program again waits for its tracing only.

A program is its text with the names of its operations (which `timing` reads), but without the files and lines that they
were traced at: code that moves, or a change to how a program is read, compiles nothing again.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import zlib
from dataclasses import asdict
from pathlib import Path

from jax.sharding import Mesh

from ..aot import CompiledProgram, Compiler, OutOfMemory
from ..config import read_environment
from ..files import make_room, whole_files


MOST_BYTES = 4 << 30  # a step of a large model is 3 MB


def compiled(compiler: Compiler, lowered, mesh: Mesh, options: dict | None = None) -> CompiledProgram:
    """`compiler.compile(lowered, options)`, once. Raises OutOfMemory where it did. `mesh`: of the compiler's chips, of the program."""
    if (cache := read_environment().cache_dir) is None:
        return compiler.compile(lowered, options)
    path = Path(cache) / "programs" / _key(compiler, lowered, mesh, options)
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)  # the longest unused go first
        return _unpacked(path.read_bytes())
    refused, made = None, None
    try:
        made = compiler.compile(lowered, options)
    except OutOfMemory as error:
        refused = [str(error), error.asked, error.limit]
    packed = zlib.compress(json.dumps({"refused": refused, "made": made and asdict(made)}).encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_files([path]) as (draft,):
        draft.write_bytes(packed)
    make_room(path.parent, MOST_BYTES)
    return _unpacked(packed)


def name_of(compiler: Compiler, lowered, mesh: Mesh, options: dict | None = None) -> str:
    """Of one program: changes with all that decides what the compiler makes of it, whether or not it writes schedules."""
    return _digest(compiler.asked_flags, compiler, lowered, mesh, options)


def _key(compiler: Compiler, lowered, mesh: Mesh, options: dict | None) -> str:
    """Changes with all that decides what the compiler makes and how long it takes."""
    return _digest(compiler.flags, compiler, lowered, mesh, options)


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


def _unpacked(packed: bytes) -> CompiledProgram:
    kept = json.loads(zlib.decompress(packed))
    if kept["refused"] is not None:
        raise OutOfMemory(*kept["refused"])
    return CompiledProgram(**kept["made"])
