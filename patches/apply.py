"""Keeps the patch set: `python patches/apply.py apply | check | refresh | move VERSION`.

apply    lay upstream's files and the patches into src/diffusers (an installation does the same)
check    say what is wrong with the patch set, if anything
refresh  turn hand-made edits of upstream's files in src/diffusers into a patch
move     merge the patches into another release of upstream's, and lay that
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from check import problems_of
from laying import lay
from move import move
from refresh import refresh
from series import listed
from unified import ForkError
from upstream import read_pin


ROOT = Path(__file__).resolve().parents[1]


def run_apply(options: argparse.Namespace) -> int:
    laid = lay(ROOT, options.wheel, options.discard)
    print(
        f"src/diffusers: {laid.total} files of {read_pin(ROOT).requirement} with {len(listed(ROOT / 'patches'))} patches;"
        f" {len(laid.written)} written, {len(laid.removed)} removed"
    )
    return 0


def run_check(options: argparse.Namespace) -> int:
    problems = problems_of(ROOT, options.wheel)
    for problem in problems:
        print(problem)
    count = len(listed(ROOT / "patches"))
    print(
        f"{count} patches on {read_pin(ROOT).requirement}: "
        + (f"{len(problems)} problems" if problems else "in order")
    )
    return 1 if problems else 0


def run_refresh(options: argparse.Namespace) -> int:
    path = refresh(ROOT, options.into, options.subject)
    print(f"{path.relative_to(ROOT)} holds the edits" if path else "nothing was edited by hand: nothing to do")
    return 0


def run_move(options: argparse.Namespace) -> int:
    left = move(ROOT, options.version, options.wheel)
    count = len(listed(ROOT / "patches"))
    print(f"src/diffusers and {count} patches are of {read_pin(ROOT).requirement}", flush=True)
    contract = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/tpu/test_contract.py"]
    if (ROOT / contract[-1]).is_file() and subprocess.run(contract, cwd=ROOT).returncode:
        left.append("private names that moved, above: tests/tpu/contract.json and the files that read them")
    left += [
        "make .venv/installed",
        "make test",
        "make records",
        "other pages and files that name the release: git grep",
    ]
    print("left to do:", *left, sep="\n  ")
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("apply", help="lay upstream's files and the patches into src/diffusers")
    command.add_argument("--wheel", type=Path, help="upstream's wheel, where the release is not yet in .upstream/")
    command.add_argument(
        "--discard", nargs="*", metavar="FILE", help="overwrite these hand-edited files; without a name, all of them"
    )
    command.set_defaults(run=run_apply)

    command = commands.add_parser("check", help="say what is wrong with the patch set, if anything")
    command.add_argument("--wheel", type=Path, help="upstream's wheel, where the release is not yet in .upstream/")
    command.set_defaults(run=run_check)

    command = commands.add_parser("refresh", help="turn hand-made edits of upstream's files into a patch")
    command.add_argument("--into", metavar="PATCH", help="the patch that takes the edits; without it, a new one")
    command.add_argument("--subject", default="TODO", help="a new patch's subject, `area: what it does`")
    command.set_defaults(run=run_refresh)

    command = commands.add_parser("move", help="merge the patches into another release, and lay that")
    command.add_argument("version", metavar="VERSION", help="of upstream, such as 0.41.0; pip fetches it")
    command.add_argument("--wheel", type=Path, help="its wheel, instead of pip's")
    command.set_defaults(run=run_move)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return options.run(options)
    except (ForkError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
