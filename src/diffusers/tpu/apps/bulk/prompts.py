"""A file of prompts: a txt with one prompt per line, or a jsonl with one object per line."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..generation.signature import SEEDS


ID = re.compile(r"[A-Za-z0-9][\w-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class Prompt:
    """One line: `place` from 0 among the prompts, `id` the name of its files; `arguments` of the pipeline without the prompt."""

    place: int
    id: str
    prompt: str
    seed: int
    arguments: dict


def read(path: Path, seed: int, arguments: dict) -> list[Prompt]:
    """The prompts of a .txt or .jsonl.

    Args:
        seed: without a seed of its own, the prompt at place n has seed + n.
        arguments: of every prompt, unless its own line sets them.

    Raises ValueError for an invalid file, with the line's number.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"expected a .txt (one prompt a line) or a .jsonl (one object a line), got {str(path)!r}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # U+2028 and the like are part of a prompt
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a file of prompts in UTF-8, got {str(path)!r}: {error}") from error
    found, ids = [], {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line:
            continue
        one = _object(line, number) if path.suffix == ".jsonl" else {"prompt": line}
        place, own_id, own_seed = len(found), one.pop("id", f"{len(found):05d}"), one.pop("seed", seed + len(found))
        own_id = str(own_id) if type(own_id) is int else own_id
        if not isinstance(own_id, str) or not ID.fullmatch(own_id):
            raise ValueError(f"expected an id of letters, digits, - or _ (up to 100) in line {number}, got {own_id!r}")
        if type(own_seed) is not int or own_seed not in SEEDS:
            raise ValueError(f"expected a seed from 0 to 2**63 - 1 in line {number}, got {own_seed!r}")
        if own_id in ids:
            raise ValueError(f"expected every id once, got {own_id!r} in lines {ids[own_id]} and {number}")
        ids[own_id] = number
        found.append(Prompt(place, own_id, one.pop("prompt"), own_seed, {**arguments, **one}))
    if not found:
        raise ValueError(f"expected at least one prompt in {path}, got none")
    return found


def _object(line: str, number: int) -> dict:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object in line {number}, got {line[:60]!r}: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise ValueError(f'expected an object with "prompt" as text in line {number}, got {line[:60]!r}')
    return value
