"""What the compiler made of a program, kept on disk: who asks for the same program again waits for its tracing only.

A program is its text with the names of its operations (which `timing` reads), but without the files and lines that they
were traced at: code that moves, or a change to how a program is read, compiles nothing again.
"""

import hashlib
import importlib.metadata
import json
import os
import zlib
from dataclasses import asdict, fields
from pathlib import Path

from jax.sharding import Mesh

from ...utils import logging
from ..aot import CompiledProgram, Compiler, OutOfMemory
from ..config import read_environment
from ..files import make_room, whole_files


logger = logging.get_logger(__name__)
FIELDS = {field.name for field in fields(CompiledProgram)}
MOST_BYTES = 4 << 30  # a step of a large model is 3 MB


def compiled(compiler: Compiler, lowered, mesh: Mesh, options: dict | None = None) -> CompiledProgram:
    """`compiler.compile(lowered, options)`, once. Raises OutOfMemory where it did. `mesh`: of the compiler's chips, of the program."""
    if (cache := read_environment().cache_dir) is None:
        return compiler.compile(lowered, options)
    path = Path(cache) / "programs" / _key(compiler, lowered, mesh, options)
    if (known := _kept(path)) is not None:
        return _unpacked(known)
    refused, made = None, None
    try:
        made = compiler.compile(lowered, options)
    except OutOfMemory as error:
        refused = [str(error), error.asked, error.limit]
    answer = {"refused": refused, "made": made and asdict(made)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_files([path]) as (draft,):
            draft.write_bytes(zlib.compress(json.dumps(answer).encode()))
        make_room(path.parent, MOST_BYTES)
    except OSError as error:  # full, or not to be written to: the answer is there all the same
        logger.warning(
            f"expected to keep what the compiler answered in {path.parent}, got {error}: the next run asks it again. Make"
            " room, or set DIFFUSERS_TPU_CACHE to another directory or to off."
        )
    return _unpacked(answer)


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


def _kept(path: Path) -> dict | None:
    """The answer that is kept here; None: there is none, or none that can be read, which is said."""
    try:
        os.utime(path)  # the longest unused go first
    except OSError:
        if not path.is_file():
            return None
    try:
        kept = json.loads(zlib.decompress(path.read_bytes()))
        if set(kept) != {"refused", "made"} or kept["made"] and set(kept["made"]) != FIELDS:
            raise ValueError(f"it holds {sorted(kept)}")
        return kept
    except (OSError, ValueError, zlib.error) as error:
        logger.warning(f"expected a kept answer of the compiler in {path}, got {error}: it is asked again")
        return None


def _unpacked(kept: dict) -> CompiledProgram:
    if kept["refused"] is not None:
        raise OutOfMemory(*kept["refused"])
    return CompiledProgram(**kept["made"])
