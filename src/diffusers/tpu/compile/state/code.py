"""Which names the code of a Python function reads: what a program must be keyed by, beside its arguments, where the function is the user's.

Bytecode tells it: names of globals, attributes and modules, of the functions that are defined inside too. A text constant counts as
the name of an attribute (`getattr(settings, "strength")`).
"""

import dis
import functools
import types
from dataclasses import dataclass


GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
# Functions of Python whose answer depends on more than their arguments, and `print`, which a program would do once.
IMPURE_BUILTINS = frozenset(
    {"open", "input", "print", "eval", "exec", "globals", "locals", "breakpoint", "__import__"}
)
# The same of libraries: a module's names, None for all of them.
IMPURE: dict[str, frozenset[str] | None] = {
    "time": None,
    "datetime": frozenset({"now", "today", "utcnow"}),
    "uuid": frozenset({"uuid1", "uuid4"}),
    "secrets": None,
    "subprocess": None,
    "socket": None,
    "os": frozenset({"urandom", "getpid", "listdir", "scandir", "stat", "open", "read", "popen", "system", "times"}),
    "sys": frozenset({"stdin", "stdout", "stderr", "argv", "modules", "_getframe"}),
    "inspect": frozenset({"currentframe", "stack"}),
    "importlib": None,
    "gc": None,
    "ctypes": None,
    "pathlib": frozenset(
        {"read_text", "read_bytes", "exists", "is_file", "is_dir", "iterdir", "glob", "stat", "open"}
    ),
    "numpy": frozenset({"load", "fromfile", "loadtxt", "genfromtxt", "memmap"}),
    "torch": frozenset({"load"}),
    "PIL.Image": frozenset({"open"}),
    "safetensors.torch": frozenset({"load_file"}),
    "threading": frozenset({"get_ident", "current_thread", "active_count"}),
}
DYNAMIC = frozenset({"getattr", "vars", "__dict__", "hasattr", "__getattribute__"})


@dataclass(frozen=True)
class Names:
    """What a code names.

    Attributes:
        globals: of its module, or of Python.
        attributes: of objects and modules, methods too.
        modules: imported inside of it.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """Of a code, and of all that is defined inside of it."""
    found: dict[str, set[str]] = {"globals": set(), "attributes": set(), "modules": set()}
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in GLOBALS:
            found["globals"].add(name)
        elif instruction.opname == "IMPORT_NAME":
            found["modules"].add(name)
        elif "ATTR" in instruction.opname or "METHOD" in instruction.opname or instruction.opname == "IMPORT_FROM":
            found["attributes"].add(name)
    for constant in _constants(code.co_consts):
        if isinstance(constant, types.CodeType):
            inner = names_of(constant)
            found["globals"] |= inner.globals
            found["attributes"] |= inner.attributes
            found["modules"] |= inner.modules
        elif isinstance(constant, str) and constant.isidentifier():
            found["attributes"].add(constant)
    return Names(*map(frozenset, found.values()))


def _constants(constants):
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _constants(constant)
        else:
            yield constant


@functools.lru_cache(maxsize=1024)
def reads_its_first(code: types.CodeType) -> bool:
    """Whether a method's code does anything with its object."""
    names = [step.argval for step in dis.get_instructions(code) if "FAST" in step.opname]
    return any(code.co_varnames[0] in (name if isinstance(name, tuple) else (name,)) for name in names)


def impure(module: str, names: frozenset[str]) -> str | None:
    """What of a library's module a code with these names may call that answers differently each time."""
    if module not in IMPURE:
        return None
    some = IMPURE[module]
    found = sorted(names if some is None else names & some)
    return f"{module}.{found[0]}" if found and some is not None else module if some is None else None
