"""Converts words of the command line to arguments of a pipeline's `__call__`, by its signature: any pipeline works."""

import inspect

from ..generation.signature import OURS, check_number, parameters_of, types_of
from . import TABLE


OF_PIPELINES = tuple(name[2:].replace("-", "_") for name in TABLE["groups"]["pipeline"]["options"])
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def given_arguments(options, rest: list[str]) -> dict[str, list[str]]:
    """Words by argument name: from the options in `OF_PIPELINES`, and from each `--name value` in `rest`."""
    given = {name: words for name in OF_PIPELINES if (words := getattr(options, name, None)) is not None}
    name = None
    for word in rest:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given.setdefault(name, []).extend([value] if equals else [])
            name = None if equals else name
        elif name is None:
            raise ValueError(f"expected --name value, got {word!r} with no name before it")
        else:
            given[name].append(word)
            name = None
    return given


def config_of(options, **more) -> dict:
    """The fields of `TPUConfig`, without the mesh, that the options change. `more`: further options with their defaults."""
    plain = {**more, "attention": "auto", "linear": "bfloat16", "attention_sparsity": 0.0}
    return {name: value for name, default in plain.items() if (value := getattr(options, name)) != default}


def numbers(options, rest: list[str]) -> dict:
    """Arguments without a pipeline's signature: a number if the word is one, else the word itself."""
    found = {}
    for name, words in given_arguments(options, rest).items():
        if len(words) != 1:
            raise ValueError(f"expected {flag(name)} once with a value, got {words}")
        found[name] = next((x for kind in (int, float) if (x := _number(kind, words[0])) is not None), words[0])
        check_number(name, found[name])
    return found


def call_arguments(pipeline_class: type, given: dict[str, list[str]]) -> dict:
    """Arguments for the pipeline's `__call__`.

    Raises ValueError for a name it does not take, a value of another type, or a type that no command line can give.
    """
    parameters = parameters_of(pipeline_class)
    return {name: _value(pipeline_class, name, words, parameters) for name, words in given.items()}


def require(pipeline_class: type, names):
    """Raises ValueError if the pipeline takes no argument of one of these names, or needs one that is not among them."""
    parameters = parameters_of(pipeline_class)
    for name in names:
        if name not in parameters:
            raise ValueError(unknown(pipeline_class, name))
    if missing := [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in names]:
        raise ValueError(f"{pipeline_class.__name__} needs {', '.join(map(flag, missing))}")


def unknown(pipeline_class: type, name: str) -> str:
    simple = [flag(n) for n, p in parameters_of(pipeline_class).items() if types_of(p) or n == "image"]
    return f"{pipeline_class.__name__} takes no {flag(name)}; it takes {' '.join(simple)}"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(pipeline_class: type, name: str, words: list[str], parameters: dict):
    if name not in parameters:
        raise ValueError(unknown(pipeline_class, name))
    types, annotation = types_of(parameters[name]), parameters[name].annotation
    if not types:
        reason = "is set by the command itself" if name in OURS else "is nothing that a command line can give"
        raise ValueError(f"{flag(name)} of {pipeline_class.__name__} ({annotation}) {reason}")
    if not words:
        if "bool" not in types:
            raise ValueError(f"expected a value after {flag(name)}")
        return True
    if "list" in str(annotation) and "str" not in types:
        return [_converted(name, part, types) for word in words for part in word.split(",")]
    values = [_converted(name, word, types) for word in words]
    if len(values) > 1 and name not in ("prompt", "negative_prompt"):
        raise ValueError(f"expected {flag(name)} once, got it {len(values)} times")
    return values if len(values) > 1 else values[0]


def _converted(name: str, word: str, types: list[str]):
    if "str" in types:
        return word
    if "bool" in types and word.lower() in TRUTH:
        return TRUTH[word.lower()]
    for kind in (int, float):
        if kind.__name__ in types and (value := _number(kind, word)) is not None:
            check_number(name, value)
            return value
    raise ValueError(f"expected {flag(name)} of type {' or '.join(dict.fromkeys(types))}, got {word!r}")


def _number(kind: type, word: str):
    try:
        return kind(word)
    except ValueError:
        return None
