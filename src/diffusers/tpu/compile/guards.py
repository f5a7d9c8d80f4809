"""What calls of a module decide before their programs: questions that traces have asked, and each call's answers to them.

The first question is the same for all calls of one kind (its shapes, the module's state); which comes next is up to the answers
so far. So a call is asked until nobody knows a further question: its answers are a part of its program's key.
"""

import numpy as np

from .. import bridge, notices
from .call import Call, values_of
from .recent import Recent


MOST_RUN_ONCE = 8
MOST_ASKED = 8  # questions of a program, where all have as many


class Guards:
    """The questions of one module's traces. `most`: programs that are kept of it.

    Attributes:
        questions: the one that follows on these answers, by kind of call and answers.
        alone: kinds of calls that do not run side by side, as each decides for itself.
    """

    def __init__(self, name: str, most: int):
        self.name = name
        self.questions: dict[tuple, bridge.Question] = Recent(MOST_ASKED * most)
        self.alone: dict[tuple, bool] = Recent(most)

    def answers(self, kind: tuple, call: Call) -> tuple:
        """What this call answers to all questions that are known for it."""
        answers = ()
        while (question := self.questions.get((kind, answers))) is not None:
            answers += (_hashable(question.answer(lambda number: values_of(call.tensors[number]))),)
        return answers

    def fickle(self, key: tuple, programs: dict) -> bridge.Line | None:
        """The line whose answers make programs that run once: as many in a row that another one is not worth it; else None."""
        last = [program for (*kind, answers), program in programs.items() if answers and tuple(kind) == key[:-1]]
        if len(last) < MOST_RUN_ONCE or any(program.calls > 1 for program in last[-MOST_RUN_ONCE:]):
            return None
        question = self.questions.get((key[:-1], ()))
        return None if question is None else question.line

    def learn(self, kind: tuple, decisions: bridge.Decisions) -> tuple:
        """The answers of a trace that came to its end, whose questions are known from here on."""
        for answers, question in self.asked(decisions):
            self.know(kind, answers, question)
        return tuple(map(_hashable, decisions.made.values()))

    @staticmethod
    def asked(decisions: bridge.Decisions) -> list[tuple[tuple, bridge.Question]]:
        """The questions of a trace, each behind the answers that were there when it was asked."""
        found, answers = [], ()
        for question, answer in decisions.made.items():
            found.append((answers, question))
            answers += (_hashable(answer),)
        return found

    def know(self, kind: tuple, answers: tuple, question: bridge.Question):
        """The question that follows on these answers, which another process has left."""
        if (kind, answers) not in self.questions:
            self.questions[kind, answers] = question
            self._say(kind, question)

    def _say(self, kind: tuple, question: bridge.Question):
        notices.warn_once(
            f"decided {self.name} {question.line}",
            f"{self.name}.{kind[0][0]} asks for values ({question.line}): they are decided before each call, from its small"
            " inputs, and each answer has a program of its own",
        )


def _hashable(answer: np.ndarray) -> tuple:
    return answer.shape, answer.dtype.str, answer.tobytes()
