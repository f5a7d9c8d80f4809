"""The planted faults of `faults.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[3]
TPU = "src/diffusers/tpu/"


@dataclass(frozen=True)
class Mutant:
    """A row of `faults.toml`, under the name by which its record is kept."""

    name: str
    file: str
    old: str
    new: str
    fault: str
    tests: tuple[str, ...]
    survives: str = ""

    @property
    def room(self) -> str:
        """The room of the file; upstream's patched files are the room `patches`."""
        if self.file.startswith(TPU):
            return self.file.removeprefix(TPU).split("/")[0].removesuffix(".py")
        return "models" if self.file.endswith("_flax.py") else "patches"

    def planted(self, text: str) -> str:
        """The file's text with the fault. Raises ValueError where the text to change is not there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"expected the text of mutant {self.name} once in {self.file}, found it {text.count(self.old)} times:"
                f" bring tests/tpu/mutants/faults.toml up to date with the file. Text: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def every() -> list[Mutant]:
    rows = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
    return [Mutant(name, **{**row, "tests": tuple(row["tests"])}) for name, row in rows.items()]
