"""`diffusers-tpu generate --prompts`: outputs of all prompts of a file in one directory, see the package `bulk`."""

import argparse
import functools
import importlib.util
from pathlib import Path

from ..bulk import prompts as prompt_files
from ..bulk.directory import Directory
from ..bulk.work import Work
from ..generation.signature import check_arguments
from . import NUMBERS, arguments, number, session
from .errors import loading
from .output import SUFFIXES, say


def _load(options: argparse.Namespace):
    """The command's pipeline, in this process or in an actor's."""
    target = session.chosen(options)
    pipe = session.load(options, target, session.mesh_of(options.mesh, target))
    pipe.set_progress_bar_config(disable=True)
    if target is not None:
        import jax

        # Each process chooses its next prompt by itself, so the processes of one slice could not run one program together.
        if jax.process_count() > 1:
            raise ValueError(
                f"expected a slice of one host for each process with --prompts, got one of {jax.process_count()} processes of"
                " a slice. Start one command a host, each on its own chips, or --ray with one actor a host"
            )
    return pipe


def run(options, rest: list[str]) -> int:
    """Run the command; exit status 1 if a prompt could not be made."""
    resources = _checked(options)
    if options.ray is None:
        session.chosen(options)  # refused before anything is written
    cls, call = session.asked(options, rest)
    with loading():
        prompts = prompt_files.read(Path(options.prompts), options.seed or 0, call)
        check_arguments(cls, call)  # an error here is every prompt's
        given = {"prompt", *(name for prompt in prompts for name in prompt.arguments)}
        arguments.require(cls, given & arguments.parameters_of(cls).keys())
        directory = Directory(Path(options.output or Path("out") / Path(options.prompts).stem))
        directory.agree(prompts, {"model": options.model, "dtype": options.dtype, "fps": options.fps})

    def told(record: dict):
        what = record["error"] if "error" in record else f"{', '.join(record['files'])}, {record['seconds']} s"
        say(f"{record['place'] + 1} of {len(prompts)}: {what}")

    retry = directory.failed(prompts) if options.retry else []
    load = functools.partial(_load, options)
    settings = {"batch": options.batch, "fps": options.fps, "retry": retry}
    if options.ray is None:
        Work(directory, load, cls, told=told, **settings).run(prompts)
    else:
        from ..bulk import ray_data

        ray_data.run(directory, load, cls, prompts, options.ray, resources, **settings)
    records = directory.write_manifest(prompts)
    errors = [record for record in records if "error" in record]
    for record in errors:
        say(f"{record['id']}: {record['error']}")
    again = " says what became of each; --retry makes the others again" if errors else ""
    made = f"{len(records) - len(errors)} of {len(records)} prompts made"
    say(f"{made}; {directory.path / 'manifest.jsonl'}{again}")
    return 1 if errors else 0


def _checked(options) -> dict[str, float]:
    """`--ray-resources` as numbers by name. Raises ValueError for flags that do not go together."""
    if options.output is not None and Path(options.output).suffix in (*SUFFIXES, ".safetensors"):
        raise ValueError(f"expected --output to be a directory with --prompts, got {options.output!r}")
    if options.ray is not None and None in map(importlib.util.find_spec, ("ray", "pyarrow")):
        raise ValueError("expected Ray Data with --ray, it is not installed: pip install '.[ray]'")
    found = {}
    for text in options.ray_resources or []:
        name, _, count = text.partition("=")
        try:
            found[name] = number("--ray-resources", NUMBERS["float"], count)
        except argparse.ArgumentError:
            raise ValueError(f"expected --ray-resources NAME=COUNT, such as TPU=8, got {text!r}") from None
    return found
