"""The command line, `diffusers-tpu`: the only package that prints.

Exit status: 0 done; 1 something failed; 2 bad input, reported in one line; 130 interrupted.
"""

import argparse
import contextlib
import functools
import importlib
import os
import sys
import tomllib
from pathlib import Path

from ...chips import hosts
from ...common.config import ATTENTIONS, LINEAR
from ...common.errors import Failure
from ..generation.signature import SEEDS
from .errors import one_line, raised_here
from .output import check_writable


TABLE = tomllib.loads((Path(__file__).parent / "commands.toml").read_text())
DEFAULTS = {name[2:]: option["default"] for name, option in TABLE["options"].items() if "default" in option}
ACTIONS = {"yes or no": argparse.BooleanOptionalAction}
CHOICES = {"attentions": ATTENTIONS, "linear": LINEAR, "any": None}
NUMBERS = {"int": (int, 0, SEEDS[-1]), "count": (int, 1, SEEDS[-1]), "float": (float, 0, 10**9)}  # type, least, most


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors raise ValueError instead of printing the usage and exiting."""

    def error(self, message):
        raise ValueError(f"{message}. {self.prog} --help lists what there is.")


def make_parser() -> argparse.ArgumentParser:
    """The parser of `diffusers-tpu`, made from commands.toml; each command's module is imported when it runs."""
    parser = Parser(
        prog="diffusers-tpu", description="diffusers on TPU: run pipelines, and check them against upstream."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in TABLE["commands"].items():
        texts = {key: command[key] for key in ("help", "description", "epilog") if key in command}
        made = commands.add_parser(name, **texts, allow_abbrev=False)
        _add_options(made, command)
        for group in (TABLE["groups"][key] for key in command.get("groups", ())):
            titled = "title" in group
            _add_options(made.add_argument_group(group["title"], group.get("description")) if titled else made, group)
    return parser


def _add_options(parser, table: dict):
    options = table["options"]
    for name, own in options.items() if isinstance(options, dict) else dict.fromkeys(options, {}).items():
        shared = {} if own.get("action") == "store_true" else TABLE["options"].get(name, {})
        given = {**shared, **table.get("each", {}), **own}
        for key, named in (("action", ACTIONS), ("choices", CHOICES)):
            if isinstance(given.get(key), str):
                given[key] = named.get(given[key], given[key])
        if "type" in given:
            given["type"] = functools.partial(number, name, NUMBERS[given["type"]])
        parser.add_argument(name, **given)


def number(flag: str, limits: tuple, text: str) -> int | float:
    """The number in `text`. `limits`: one of NUMBERS. Raises argparse.ArgumentError for other texts, NaN among them."""
    kind, least, most = limits
    with contextlib.suppress(ValueError):
        if least <= (value := kind(text)) <= most:
            return value
    limits = f"of at least {least}, at most {most} ({kind.__name__})"
    raise argparse.ArgumentError(None, f"expected {flag} {limits}, got {text!r}")


def _check(options: argparse.Namespace):
    """Raises ValueError for flags that a rule of commands.toml refuses together, and for files that cannot be written."""
    given = {n: v for n, v in vars(options).items() if v is not None and v is not False and v != DEFAULTS.get(n)}
    for rule in TABLE["commands"][options.command].get("rules", ()):
        refused = all(
            (name in given) is wanted if isinstance(wanted, bool) else given.get(name) in wanted
            for name, wanted in rule["when"].items()
        )
        for name in rule["flags"]:
            if refused and name in given:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(rule["message"].format(flag=flag, **vars(options)))
    for name, suffix in (("json", ".json"), ("report", ".html")):
        if isinstance(path := given.get(name), str):
            check_writable(path, suffix)


def _function(options: argparse.Namespace) -> tuple[str, str]:
    """The module and the name of the function that runs the command."""
    if options.command == "compare":
        return "compare", "trace" if options.trace else "run"
    if options.command == "generate":
        return "bulk" if options.prompts is not None else "generate" if options.stage is None else "staged", "run"
    return ("plan", "make_executables") if options.command == "compile" else (options.command, "run")


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        options, rest = make_parser().parse_known_args(argv)
        before = argv[argv.index(options.model) - 1] if getattr(options, "model", None) in argv else ""
        if before.startswith("--") and before in rest:  # argparse took its value for the model
            raise ValueError(
                f"expected MODEL before arguments of the pipeline, got {before} {options.model} in its place"
            )
        groups = TABLE["commands"][options.command].get("groups", ())
        if rest and not {"pipeline", "plan"} & {*groups}:
            raise ValueError(f"expected no further arguments of {options.command}, got {' '.join(rest)}")
        _check(options)
        module, name = _function(options)
        return getattr(importlib.import_module(f".{module}", __package__), name)(options, rest)
    except (ValueError, NotImplementedError) as error:
        if not raised_here(error):
            raise
        print(f"diffusers-tpu: {one_line(error)}", file=sys.stderr)
        hosts.failed(one_line(error), 2)
        return 2
    except Failure as error:
        print(f"diffusers-tpu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("diffusers-tpu: interrupted", file=sys.stderr)
        hosts.failed("interrupted", 130)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as stop:  # argparse's --help
        return stop.code or 0
