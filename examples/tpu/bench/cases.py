"""A case of a bench: a row's identity, the question to the compiler, and how the rest of the row is read from its answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from diffusers.tpu.planner import Question


KERNELS = "bench.attention_row:answer"
VAES = "bench.vae_row:answer"
AS_THEIRS = "bench.calibration:as_theirs"
DENOISERS = ["transformer", "transformer_2", "unet", "controlnet"]
IMAGE = {"height": 1024, "width": 1024}
LTX = {"height": 512, "width": 768, "num_frames": 121}


@dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        row: what it is.
        question: the compiler's; None for what is measured here.
        read: the rest of the row, of the answer; of nothing if there is no question.
        as_run: the question is asked a second time without schedules; `read` takes that answer too.
        anyway: `read` takes the answer of a program that finds no room too.
    """

    row: dict
    question: Question | None
    read: Callable[..., dict]
    as_run: bool = False
    anyway: bool = False

    def ask(self, on_progress: Callable = lambda text: None) -> dict:
        """The rest of the row. Raises ValueError for what has no figures, and as `Question.answer`."""
        if self.question is None:
            return self.read()
        answers = [self.question.answer(on_progress)]
        if not self.anyway:
            _check_room(answers[0])
        if self.as_run:
            answers.append(replace(self.question, schedules=False).answer(on_progress))
        return {**self.read(*answers), **{name: answers[0][name] for name in ("programs", "reader", "versions")}}


def _check_room(answer: dict):
    """Raises ValueError where the compiler found no room for a program."""
    for part in answer.get("parts", ()):
        if part["refused"]:
            what = f"{part['component']}.{part['entry']} of {answer['model']} on {answer['topology']}"
            raise ValueError(f"expected a chip with room for {what}, the compiler says: {part['refused']['message']}")
