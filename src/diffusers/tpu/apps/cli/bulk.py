"""`diffusers-tpu generate --prompts`: every prompt of a file into a directory, see the room `bulk`."""

import argparse
import dataclasses
import functools
import importlib.util
from pathlib import Path

from rich.console import Console

from ..bulk import prompts as prompt_files
from ..bulk.directory import Directory
from ..bulk.work import Work
from . import arguments, session
from .errors import BadInput, loading


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads the command's pipeline, in this process or in an actor's."""

    options: argparse.Namespace

    def __call__(self):
        from . import generate

        target = session.choose_target(self.options.device)
        pipe = session.load(self.options.model, generate.dtype_of(self.options))
        pipe = generate.placed(pipe, self.options, target, session.mesh_of(self.options.mesh, target))
        pipe.set_progress_bar_config(disable=True)
        if target is not None:
            _check_processes()
        return pipe


def run(options, rest: list[str]) -> int:
    """The command; returns its exit status: 1 where a prompt could not be made."""
    _check_flags(options)
    if options.ray is None:
        session.choose_target(options.device)  # refused before anything is written
    cls = session.pipeline_class(options.model)
    names = [name for name in arguments.OF_PIPELINES if name != "prompt"]
    call = arguments.call_arguments(cls, arguments.given_arguments(options, rest, names))
    with loading():
        prompts = prompt_files.read(Path(options.prompts), options.seed or 0, call)
        directory = Directory(Path(options.output or Path("out") / Path(options.prompts).stem))
        directory.agree(prompts, {"model": options.model, "dtype": options.dtype, "fps": options.fps})
    settings = {
        "batch": options.batch,
        "fps": options.fps,
        "retry": directory.failed(prompts) if options.retry else [],
    }
    if options.ray is None:
        told = functools.partial(_tell, Console(), len(prompts))
        Work(directory, Loader(options), cls, told=told, **settings).run(prompts)
    else:
        from ..bulk import ray_data

        ray_data.run(
            directory, Loader(options), cls, prompts, options.ray, _resources(options.ray_resources), **settings
        )
    return _summary(Console(), directory, directory.write_manifest(prompts))


def _check_processes():
    """Which prompt is next, one process decides for itself: those of one slice could not run one program together."""
    import jax

    if jax.process_count() > 1:
        raise BadInput(
            f"expected a slice of one host for each process with --prompts, got one of {jax.process_count()} processes of a"
            " slice. Start one command a host, each on its own chips, or --ray with one actor a host"
        )


def _tell(console: Console, total: int, record: dict):
    what = record["error"] if "error" in record else f"{', '.join(record['files'])}, {record['seconds']} s"
    console.print(f"{record['place'] + 1} of {total}: {what}", markup=False, highlight=False, soft_wrap=True)


def _summary(console: Console, directory: Directory, records: list[dict]) -> int:
    errors = [record for record in records if "error" in record]
    for record in errors:
        console.print(f"{record['id']}: {record['error']}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{len(records) - len(errors)} of {len(records)} prompts made; {directory.path / 'manifest.jsonl'}"
        + (" says what became of each; --retry makes the others again" if errors else ""),
        soft_wrap=True,
    )
    return 1 if errors else 0


def _check_flags(options):
    for name in ("prompt", "image", "stage", "input"):
        if getattr(options, name) is not None:
            raise BadInput(f"expected --prompts without --{name}: each line of the file has its own arguments")
    if options.batch < 1 or (options.ray is not None and options.ray < 1):
        raise BadInput("expected --batch and --ray of at least 1")
    if options.output is not None and Path(options.output).suffix:
        raise BadInput(f"expected --output to be a directory with --prompts, got {options.output!r}")
    if options.ray_resources and options.ray is None:
        raise BadInput("expected --ray with --ray-resources: they are of Ray's actors")
    if options.ray is not None and None in map(importlib.util.find_spec, ("ray", "pyarrow")):
        raise BadInput("expected Ray Data with --ray, it is not installed: pip install '.[ray]'")


def _resources(texts: list[str] | None) -> dict[str, float]:
    """Of `NAME=COUNT` each."""
    found = {}
    for text in texts or []:
        name, _, count = text.partition("=")
        try:
            found[name] = float(count)
        except ValueError:
            raise BadInput(f"expected --ray-resources NAME=COUNT, such as TPU=8, got {text!r}") from None
    return found
