"""A case of a bench: a row's identity, the question to the compiler, and a function that reads the rest of the row from the answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from diffusers.tpu.planner import Question


KERNELS = "bench.attention_row:answer"
VAES = "bench.vae_row:answer"
AS_THEIRS = "bench.calibration:as_theirs"
DENOISERS = ["transformer", "transformer_2", "unet", "controlnet"]
IMAGE = {"height": 1024, "width": 1024}
VIDEO_720P = {"height": 720, "width": 1280, "num_frames": 81}
LTX = {"height": 512, "width": 768, "num_frames": 121}


@dataclass(frozen=True)
class Case:
    """One row of a bench.

    Attributes:
        row: the row's identity.
        question: to the compiler; None for a row that is measured on this machine.
        read: returns the rest of the row from the answer; without a question it takes no argument.
        as_run: also compile without schedules, as a run does, and pass that answer to `read` as its second argument.
        anyway: also read the answer of a program that does not fit.
    """

    row: dict
    question: Question | None
    read: Callable[..., dict]
    as_run: bool = False
    anyway: bool = False

    def ask(self, on_progress: Callable = lambda text: None) -> dict:
        """Returns the rest of the row.

        Raises:
            ValueError: the program does not fit; also what `Question.answer` raises.
        """
        if self.question is None:
            return self.read()
        answers = [self.question.answer(on_progress)]
        if not self.anyway:
            _check_room(answers[0])
        if self.as_run:
            answers.append(replace(self.question, schedules=False).answer(on_progress))
        return {**self.read(*answers), **{name: answers[0][name] for name in ("programs", "reader", "versions")}}


def _check_room(answer: dict):
    """Raises ValueError for a program that does not fit the chip's memory."""
    for part in answer.get("parts", ()):
        if part["refused"]:
            what = f"{part['component']}.{part['entry']} of {answer['model']} on {answer['topology']}"
            raise ValueError(f"expected a chip with room for {what}, the compiler says: {part['refused']['message']}")
