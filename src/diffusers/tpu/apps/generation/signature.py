"""The parameters of a pipeline's `__call__`, from its signature, and checks of JSON values against them."""

import inspect
import re


SIMPLE = re.compile(r"\b(bool|int|float|str)\b")
COMPLEX = re.compile(r"dict|Callable", re.IGNORECASE)
OURS = {"output_type", "return_dict", "callback_on_step_end", "callback_on_step_end_tensor_inputs"}
SEEDS = range(2**63)
COUNTS = re.compile(r"height|width|max_sequence_length|num_frames|\w*num_inference_steps|num_\w+_per_\w+")
OF_BATCHES = ("generator", "num_videos_per_prompt", "num_images_per_prompt")


def parameters_of(pipeline_class: type) -> dict[str, inspect.Parameter]:
    """The named parameters of the pipeline's `__call__`."""
    parameters = inspect.signature(pipeline_class.__call__).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in parameters.items() if name != "self" and p.kind in kinds}


def types_of(parameter: inspect.Parameter) -> list[str]:
    """The simple types that its annotation allows, else its default's; none if commands set it or its type is complex."""
    annotation = parameter.annotation
    if parameter.name in OURS or COMPLEX.search(str(annotation)):
        return []
    if annotation is inspect.Parameter.empty:
        return SIMPLE.findall(type(parameter.default).__name__)
    return SIMPLE.findall(annotation.__name__ if isinstance(annotation, type) else str(annotation))


def check_arguments(pipeline_class: type, arguments: dict):
    """Raises ValueError for a name that the pipeline does not take, or a value of another type than its annotation's."""
    parameters = parameters_of(pipeline_class)
    for name, value in arguments.items():
        types = types_of(parameters[name]) if name in parameters and name not in OF_BATCHES else []
        if not types:
            known = [n for n, p in parameters.items() if types_of(p) and n not in OF_BATCHES]
            raise ValueError(
                f"expected what {pipeline_class.__name__} takes as text or numbers ({', '.join(known)}), got {name!r}"
            )
        as_is = value is None and parameters[name].default is None
        if not as_is and not _fits(value, types, "list" in str(parameters[name].annotation)):
            raise ValueError(f"expected {name!r} of type {' or '.join(dict.fromkeys(types))}, got {value!r}")
        check_number(name, value)


def check_number(name: str, value):
    """Raises ValueError for NaN, an infinity, and a size or a count below 1."""
    least, what = (1, "of at least 1") if COUNTS.fullmatch(name) else (-1e308, "to be finite")
    if isinstance(value, (int, float)) and not least <= value <= 1e308:
        raise ValueError(f"expected {name} {what}, got {value}")


def takes_batches(pipeline_class: type) -> bool:
    """Whether one call may have several prompts, each with its own generator."""
    parameters = parameters_of(pipeline_class)
    needed = [parameters.get(name) for name in ("prompt", "generator")]
    return all(p is not None and "list" in str(p.annotation).lower() for p in needed)


def _fits(value, types: list[str], lists: bool) -> bool:
    if isinstance(value, list):
        return lists and bool(value) and all(_fits(one, types, False) for one in value)
    return type(value).__name__ in types or (type(value) is int and "float" in types)
