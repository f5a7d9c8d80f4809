"""From words of the command line to arguments of a pipeline's `__call__`, by its signature: any pipeline works."""

import inspect

from ..generation.signature import OURS, parameters_of, types_of
from .choices import COMMON_ARGUMENTS
from .errors import BadInput


OF_PIPELINES = tuple(name.replace("-", "_") for name in COMMON_ARGUMENTS)
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def given_arguments(options, rest: list[str], names=OF_PIPELINES) -> dict[str, list[str]]:
    """Words by argument name: the options called `names` that were given, and what `rest` holds as `--name value`."""
    given = {name: words for name in names if (words := getattr(options, name)) is not None}
    name = None
    for word in rest:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given.setdefault(name, []).extend([value] if equals else [])
            name = None if equals else name
        elif name is None:
            raise BadInput(f"expected --name value, got {word!r} with no name before it")
        else:
            given[name].append(word)
            name = None
    return given


def call_arguments(pipeline_class: type, given: dict[str, list[str]]) -> dict:
    """Arguments for the pipeline's `__call__`.

    Raises BadInput for a name it does not take, a value of another type, or a type that no command line can give.
    """
    parameters = parameters_of(pipeline_class)
    return {name: _value(pipeline_class, name, words, parameters) for name, words in given.items()}


def require(pipeline_class: type, names):
    """Raises BadInput if the pipeline takes no argument of one of these names, or needs one that is not among them."""
    parameters = parameters_of(pipeline_class)
    for name in names:
        if name not in parameters:
            raise BadInput(unknown(pipeline_class, name))
    missing = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in names]
    if missing:
        raise BadInput(f"{pipeline_class.__name__} needs {', '.join(map(flag, missing))}")


def unknown(pipeline_class: type, name: str) -> str:
    simple = [flag(n) for n, p in parameters_of(pipeline_class).items() if types_of(p) or n == "image"]
    return f"{pipeline_class.__name__} takes no {flag(name)}; it takes {' '.join(simple)}"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(pipeline_class: type, name: str, words: list[str], parameters: dict):
    if name not in parameters:
        raise BadInput(unknown(pipeline_class, name))
    types = types_of(parameters[name])
    if not types:
        reason = "is set by the command itself" if name in OURS else "is nothing that a command line can give"
        raise BadInput(f"{flag(name)} of {pipeline_class.__name__} ({parameters[name].annotation}) {reason}")
    if not words:
        if "bool" not in types:
            raise BadInput(f"expected a value after {flag(name)}")
        return True
    if "list" in str(parameters[name].annotation) and "str" not in types:
        words = [part for word in words for part in word.split(",")]
        return [_converted(name, word, types) for word in words]
    values = [_converted(name, word, types) for word in words]
    if len(values) > 1 and name not in ("prompt", "negative_prompt"):
        raise BadInput(f"expected {flag(name)} once, got it {len(values)} times")
    return values if len(values) > 1 else values[0]


def _converted(name: str, word: str, types: list[str]):
    if "str" in types:
        return word
    if "bool" in types and word.lower() in TRUTH:
        return TRUTH[word.lower()]
    for kind in (int, float):
        if kind.__name__ in types:
            try:
                return kind(word)
            except ValueError:
                continue
    raise BadInput(f"expected {flag(name)} of type {' or '.join(dict.fromkeys(types))}, got {word!r}")
