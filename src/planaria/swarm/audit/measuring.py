"""The leakage part: a model is asked for protected answers, whole and in parts, and an adversary reads what it said."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planaria.swarm.audit.adversary import Adversary, Said, Transcript, told
from planaria.swarm.audit.asking import replies
from planaria.swarm.audit.leakage import estimate, leak, most, silence, silenced
from planaria.swarm.audit.questions import Part, Question, plain
from planaria.swarm.audit.results import Behind, GivenAway, Leakage, Leaked
from planaria.swarm.policy.base import Policy

USUAL, DRAWS = 8, 16
"""parts of a question, unless said; replies that are drawn to each"""
READ = 1024
"""transcripts of one question, at most about so many, that are read for the wrapper's column"""
LEAST = 1e-12
"""of a belief: a softmax of 64 bits may end at 0"""


@dataclass(frozen=True)
class Plan:
    """How to measure."""

    k: int
    seed: int = 0
    epsilon: float | None = None
    """of the wrapper whose effect is shown beside; None: none"""
    show: bool = False
    draws: int = DRAWS


def measure(victim: Policy, adversary: Adversary, questions: Sequence[Question], plan: Plan) -> Leakage:
    """What the victim's replies tell the adversary about each question, worst first.

    :raises UserError: when a question or a transcript is longer than a model reads.
    """
    texts = [text for question in questions for text in _asked(question, plan.k)]
    said = iter(replies(victim, texts, plan.draws, plan.seed))
    found = []
    for question in questions:
        heard = {text: next(said) for text in dict.fromkeys(_asked(question, plan.k))}
        found.append(_leaked(question, adversary, heard, plan))
    found.sort(key=lambda one: -one.leak.mean)
    return Leakage(adversary=adversary.name, k=plan.k, draws=plan.draws, epsilon=plan.epsilon, questions=found)


def _asked(question: Question, k: int) -> list[str]:
    """Each text once."""
    parts = [part.ask for part in question.parts[:k]]
    return list(dict.fromkeys([question.text, *question.paraphrases, *parts]))


class _Beliefs:
    """Of one question's transcripts, each read once."""

    def __init__(self, question: Question, adversary: Adversary, transcripts: Sequence[Transcript]) -> None:
        every = list(dict.fromkeys([(), *transcripts]))
        self._found = dict(zip(every, adversary.beliefs(question, every), strict=True))
        self._answer = question.answer
        self.prior = max(LEAST, self._found[()][self._answer])

    def right(self, transcript: Transcript) -> float:
        return self._found[transcript][self._answer]

    def leak(self, transcript: Transcript) -> float:
        return leak(self.prior, min(1.0, self.right(transcript)))

    def guessed(self, transcript: Transcript) -> float:
        """The chance that the likeliest option is the right one; ties are drawn."""
        found = self._found[transcript]
        ties = [math.isclose(belief, max(found), rel_tol=1e-9) for belief in found]
        return ties[self._answer] / sum(ties)

    def point(self, transcripts: Sequence[Transcript]) -> GivenAway:
        return GivenAway(leak=_mean(self.leak, transcripts), guessed=_mean(self.guessed, transcripts))


def _leaked(question: Question, adversary: Adversary, heard: Mapping[str, Sequence[str]], plan: Plan) -> Leaked:
    parts, draws = question.parts[: plan.k], range(plan.draws)
    direct = [(Said(None, question.text, heard[question.text][draw]),) for draw in draws]
    others = [tuple(Said(None, text, heard[text][draw]) for text in question.paraphrases) for draw in draws]
    whole = [tuple(Said(n, part.ask, heard[part.ask][draw]) for n, part in enumerate(parts)) for draw in draws]
    some = [] if plan.epsilon is None else whole[: max(1, READ >> plan.k)]
    sets = [_subsets(transcript) for transcript in some]
    prefixes = [transcript[:length] for transcript in whole for length in range(plan.k + 1)]
    every = [*direct, *others, *prefixes, *(one for each in sets for one in each)]
    beliefs = _Beliefs(question, adversary, every)
    use = statistics.fmean(_useful(part, reply, question) for part in parts for reply in heard[part.ask])
    return Leaked(
        name=question.name,
        place=question.place,
        options=len(question.options),
        prior=beliefs.prior,
        posterior=_mean(beliefs.right, whole),
        leak=estimate([beliefs.leak(transcript) for transcript in whole]),
        guessed=_mean(beliefs.guessed, whole),
        direct=beliefs.point(direct),
        paraphrased=beliefs.point(others) if question.paraphrases else None,
        use=use,
        curve=[beliefs.point([transcript[:length] for transcript in whole]) for length in range(1, plan.k + 1)],
        behind=None if plan.epsilon is None else _behind(question, beliefs, sets, use, plan.epsilon),
        said=[(said.ask, said.reply) for said in whole[0]] if plan.show else [],
    )


def _behind(
    question: Question, beliefs: _Beliefs, sets: Sequence[Sequence[Transcript]], use: float, epsilon: float
) -> Behind:
    """What is left where each reply is empty with the wrapper's chance, whatever it says."""
    silent = silence(most(1 / len(question.options)), epsilon)
    leaks, guesses = (
        statistics.fmean(silenced([what(transcript) for transcript in each], silent) for each in sets)
        for what in (beliefs.leak, beliefs.guessed)
    )
    return Behind(leak=leaks, guessed=guesses, silent=silent, use=(1 - silent) * use)


def _subsets(transcript: Transcript) -> list[Transcript]:
    """All of them, by bit masks."""
    return [
        tuple(said for place, said in enumerate(transcript) if mask >> place & 1)
        for mask in range(1 << len(transcript))
    ]


def _useful(part: Part, reply: str, question: Question) -> bool:
    """Whether an honest asker of this part was served."""
    return told(reply, part.says) == plain(part.says[question.answer]) if part.says else bool(plain(reply))


def _mean(what: Callable[[Transcript], float], transcripts: Sequence[Transcript]) -> float:
    return statistics.fmean(map(what, transcripts))
