"""Planted faults: where, what becomes of the text there, and which test is expected to see it."""

from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[3]
TPU = "src/diffusers/tpu/"
MODELS = "src/diffusers/models/"


@dataclass(frozen=True)
class Mutant:
    """A fault to plant.

    Attributes:
        name: unique, by which its record is kept.
        file: in the tree, upstream's patched files included.
        old, new: text of the file, there exactly once, and what takes its place.
        fault: what it stands for.
        tests: ids below tests/tpu, tried before the whole fast set.
        survives: why no test sees it, where none can.
    """

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
                f" bring tests/tpu/mutants up to date with the file. Text: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def in_file(file: str, *rows: tuple) -> list[Mutant]:
    """Rows of (name, old, new, fault, test or tests)."""
    return [
        Mutant(name, file, old, new, fault, (tests,) if isinstance(tests, str) else tests, *rest)
        for name, old, new, fault, tests, *rest in rows
    ]


def every() -> list[Mutant]:
    """The whole table. Raises ValueError for two of one name."""
    import faults_state
    import faults_values

    mutants = [*faults_values.MUTANTS, *faults_state.MUTANTS]
    if len({m.name for m in mutants}) < len(mutants):
        raise ValueError("expected names that are unique in tests/tpu/mutants")
    return mutants
