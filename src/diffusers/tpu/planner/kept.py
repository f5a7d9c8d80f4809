"""What the compiler made of a program, kept on disk: who asks for the same program again waits for its tracing only.

A program is its text with the names of its operations (which `timing` reads), but without the files and lines that they
were traced at: code that moves, or a change to how a program is read, compiles nothing again.
"""

import hashlib
import importlib.metadata
import json
from dataclasses import asdict, fields

from jax.sharding import Mesh

from .answers import Answers
from .aot import CompiledProgram, Compiler, OutOfMemory


FIELDS = {field.name for field in fields(CompiledProgram)}


def compiled(compiler: Compiler, lowered, mesh: Mesh, options: dict | None = None) -> CompiledProgram:
    """`compiler.compile(lowered, options)`, once. Raises OutOfMemory where it did. `mesh`: of the compiler's chips, of the program."""
    answers = Answers("programs", _is_whole)
    if answers.folder is None:
        return compiler.compile(lowered, options)
    name = _key(compiler, lowered, mesh, options)
    if (known := answers.find(name)) is not None:
        return _unpacked(known)
    refused, made = None, None
    try:
        made = compiler.compile(lowered, options)
    except OutOfMemory as error:
        refused = [str(error), error.asked, error.limit]
    answer = {"refused": refused, "made": made and asdict(made)}
    answers.keep(name, answer)
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


def _is_whole(answer: dict) -> bool:
    return set(answer) == {"refused", "made"} and (not answer["made"] or set(answer["made"]) == FIELDS)


def _unpacked(kept: dict) -> CompiledProgram:
    if kept["refused"] is not None:
        raise OutOfMemory(*kept["refused"])
    return CompiledProgram(**kept["made"])
