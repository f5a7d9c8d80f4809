"""The files of a directory of outputs.

prompts.jsonl     the run's model and settings, and every prompt with id, seed and arguments
ID.mp4, ID.png    the output of a prompt
.records/ID.json  the record of a prompt: its files, or its error; written after the files
manifest.jsonl    all records, in the prompts' order; written when every prompt has one
.claims           locks (see `claims`)
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock

from ...common.files import write_whole
from .prompts import Prompt


class Directory:
    """One directory of outputs, of one list of prompts."""

    def __init__(self, path: Path):
        self.path, self.records = path, path / ".records"
        self.records.mkdir(parents=True, exist_ok=True)
        self._alone = FileLock(path / ".prompts.lock")

    def agree(self, prompts: list[Prompt], settings: dict):
        """Write prompts.jsonl, or compare it with these prompts and settings. New prompts may follow those in the file.

        Raises ValueError with any other difference.
        """
        wanted = [{"settings": settings}, *map(asdict, prompts)]
        with self._alone:
            file = self.path / "prompts.jsonl"
            there = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            for old, new in zip(there, map(json.loads, map(json.dumps, wanted))):
                if old != new:
                    whose = "the run" if "settings" in old else f"prompt {old['id']!r}"
                    old, new = old.get("settings", old), new.get("settings", new)
                    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
                    what = "; ".join(f"{name} {old.get(name)!r}, now {new.get(name)!r}" for name in names)
                    raise ValueError(
                        f"expected what {self.path} is for, got another {whose}: {what}. Choose another --output"
                    )
            if len(there) > len(wanted):
                raise ValueError(
                    f"expected the {len(there) - 1} prompts that {self.path} is for, got {len(wanted) - 1}:"
                    f" {there[len(wanted)]['id']!r} is missing. Give it back, or choose another --output"
                )
            if len(there) < len(wanted):
                (self.path / "manifest.jsonl").unlink(missing_ok=True)  # of fewer prompts
                self._write("prompts.jsonl", wanted)

    def record(self, prompt: Prompt) -> dict | None:
        """A prompt's record; None if there is none yet, or a full disk or a crash left no valid JSON."""
        try:
            return json.loads((self.records / f"{prompt.id}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def write_record(self, prompt: Prompt, **facts):
        """Write a prompt's record: `files` (names) and `seconds`, or an `error`."""
        write_whole(self.records / f"{prompt.id}.json", json.dumps({**asdict(prompt), **facts}) + "\n")

    def failed(self, prompts: list[Prompt]) -> list[str]:
        """The ids of prompts whose record has an error."""
        return [prompt.id for prompt in prompts if "error" in (self.record(prompt) or {})]

    def clear(self, prompt: Prompt):
        """Remove drafts of a process that died while it made this prompt. The caller must hold the prompt's lock."""
        draft = re.compile(rf"\.{re.escape(prompt.id)}(-\d+)?\.\d+\.(mp4|png|json)")
        for folder in (self.path, self.records):
            for path in folder.glob(f".{prompt.id}*"):
                if draft.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def write_manifest(self, prompts: list[Prompt]) -> list[dict]:
        """Write all records to a file atomically and return them. Every process may do so at its end, with the same content."""
        records = [self.record(prompt) for prompt in prompts]
        with self._alone:
            self._write("manifest.jsonl", records)
        return records

    def _write(self, name: str, lines: Iterable[dict]):
        for left in self.path.glob(f".{Path(name).stem}.*.jsonl"):  # drafts of a process that died here
            left.unlink()
        write_whole(self.path / name, "".join(json.dumps(line) + "\n" for line in lines))
