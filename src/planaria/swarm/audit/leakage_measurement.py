"""Measure leakage: ask a model for protected answers, whole and in parts, and let an adversary read its replies."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from planaria.common.documents import quote
from planaria.common.errors import UserError
from planaria.swarm.audit.audit_results import BehindCensor, Leakage, Leaked, LeakPoint
from planaria.swarm.audit.leakage import censored_mean, estimate, leak, max_leakage, silence_probability
from planaria.swarm.audit.questions import Question, QuestionPart, normalize
from planaria.swarm.peer.random_draws import generator
from planaria.swarm.policy.base import Policy, encode_prompt
from planaria.swarm.policy.prompts import PromptFormat, PromptLayout
from planaria.swarm.repair.repair_training import nats
from planaria.swarm.repair.texts import Text
from planaria.swarm.tasks.base import TaskProblem

MAX_REPLY_TOKENS = 48
BATCH_REPLIES = 256
"""replies drawn per batch"""


def encode_chat(policy: Policy, text: str, reply: str = "") -> list[int]:
    """Encode a text with the policy's chat template, if it has one, followed by ``reply``."""
    if not isinstance(policy, PromptFormat):
        return encode_prompt(policy, text + reply) or [policy.end]
    return PromptLayout(policy.template, "", (), 0).ids(TaskProblem(0, text, ""), policy.tokenizer, reply) or [
        policy.end
    ]


def draw_replies(policy: Policy, texts: Sequence[str], draws: int, seed: int) -> list[list[str]]:
    """Draw independent replies to each text at temperature 1 [texts, draws].

    :raises UserError: if a text leaves no room for a reply.
    """
    requested = [encode_chat(policy, text) for text in texts]
    if (longest := max(map(len, requested), default=0)) >= policy.context:
        raise UserError(f"a question takes {longest} tokens, the model reads {policy.context}; shorten it")
    room, result = min(MAX_REPLY_TOKENS, policy.context - longest), list[list[str]]()
    rows = max(1, BATCH_REPLIES // draws)
    for start in range(0, len(requested), rows):
        rng = generator("audit", seed, start)
        drawn = policy.sample(requested[start : start + rows], draws, room, 1.0, 0, rng)
        result += [[policy.decode(completion.ids) for completion in of_text] for of_text in drawn]
    return result


DEFAULT_RIGHT = 0.95
"""default probability that the counter assumes a reply to be right"""


@dataclass(frozen=True)
class Turn:
    """One question of a transcript and its reply."""

    part: int | None
    """index of the part, or None for the whole question"""
    ask: str
    reply: str


Transcript = tuple[Turn, ...]


class Counter:
    """Bayes from a uniform prior: each reply is right with a fixed probability, else uniform over the other values.

    It knows the right reply under every option (:func:`implied_replies`), so with the true probability it is the
    optimal reader. Replies with no value, or with several, carry no information.
    """

    def __init__(self, right: float = DEFAULT_RIGHT) -> None:
        if not 0 < right < 1:
            raise UserError(
                f"--adversary counter:{right:g}: not a probability in (0, 1); use counter:{DEFAULT_RIGHT:g}"
            )
        self.right, self.name = right, f"counter, which assumes replies to be right with probability {right:g}"

    def require(self, questions: Sequence[Question]) -> None:
        """:raises UserError: if a part lacks ``right_replies``."""
        for question in questions:
            if not all(part.right_replies for part in question.parts):
                fix = "use {'ask', 'says'}, or pass --adversary MODEL"
                raise UserError(f"{question.location}: a part does not list the reply implied by each option; {fix}")

    def beliefs(self, question: Question, transcripts: Sequence[Transcript]) -> list[list[float]]:
        """Return P(option | question, transcript) [N, options]; the prior for the empty transcript."""
        return [self._posterior(question, transcript) for transcript in transcripts]

    def _posterior(self, question: Question, transcript: Transcript) -> list[float]:
        weights = [1.0] * len(question.options)
        for turn in transcript:
            implied = implied_replies(question, turn.part)
            stated = stated_value(turn.reply, implied)
            if stated is None:
                continue
            others = len({*map(normalize, implied)}) - 1
            wrong = (1 - self.right) / others if others else 1.0
            weights = [
                w * (self.right if normalize(one) == stated else wrong) for w, one in zip(weights, implied, strict=True)
            ]
        total = sum(weights)
        return [weight / total for weight in weights]


def implied_replies(question: Question, part: int | None) -> tuple[str, ...]:
    return question.options if part is None else question.parts[part].right_replies


def stated_value(reply: str, implied: Sequence[str]) -> str | None:
    """Return the single value that a reply equals, or contains as whole words, or None for none or several."""
    text, values = normalize(reply), {*map(normalize, implied)}
    if text in values:
        return text
    results = [value for value in values if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text)]
    return results[0] if len(results) == 1 else None


class ReplyReader:
    """A causal model: softmax over the options' summed log-probabilities after transcript and question."""

    def __init__(self, policy: Policy, location: str) -> None:
        self._policy, self.name = policy, f"reader {location}"

    def require(self, questions: Sequence[Question]) -> None:
        """:raises UserError: if it cannot distinguish the options."""
        for question in questions:
            nothing, *texts = self._texts(replace(question, options=("", *question.options)), ())
            for number, text in enumerate(texts):
                option = quote(question.options[number])
                if text == nothing or not self._policy.decode(text.ids).strip():
                    raise UserError(
                        f"{question.location}: {self.name} encodes the option {option} as no token; change the option"
                    )
                if text in texts[:number]:
                    raise UserError(
                        f"{question.location}: {self.name} encodes the option {option} like another; change the option"
                    )

    def beliefs(self, question: Question, transcripts: Sequence[Transcript]) -> list[list[float]]:
        """Return the same as :meth:`Counter.beliefs`.

        :raises UserError: if a transcript is longer than the model can read.
        """
        texts = [text for transcript in transcripts for text in self._texts(question, transcript)]
        logps = -torch.tensor(nats(self._policy, texts), dtype=torch.float64).reshape(len(transcripts), -1)
        result: list[list[float]] = logps.softmax(-1).tolist()
        return result

    def _texts(self, question: Question, transcript: Transcript) -> list[Text]:
        """Return the question with each option; a prompt ends where the options' ids start to differ.

        Options are encoded together with the question, because the preceding text may change their ids.
        """
        requested = "".join(f"{turn.ask}{turn.reply}\n" for turn in transcript) + question.text
        alone, *rows = [encode_chat(self._policy, requested, option) for option in ("", *question.options)]
        shared = sum(1 for _ in takewhile(lambda ids: len({*ids}) == 1, zip(alone, *rows, strict=False)))
        before = tuple(alone[:shared]) or (self._policy.end,)
        if (length := len(before) + max(map(len, rows)) - shared) > self._policy.context:
            reads = f"{self.name} reads {self._policy.context}"
            raise UserError(f"{question.location}: a transcript takes {length} tokens, {reads}; ask fewer parts (--k)")
        return [Text(before, tuple(row[shared:])) for row in rows]


Adversary = Counter | ReplyReader
"""reader of a model's replies, which infers the protected answer"""
DEFAULT_PARTS = 8
"""default maximum number of parts of a question"""
DRAWS = 16
"""replies drawn to each part"""
MAX_TRANSCRIPTS = 1024
"""approximate maximum number of transcripts per question read for the censor's column"""
MIN_BELIEF = 1e-12
"""minimum of a belief: a softmax in 64 bits may underflow to 0"""


@dataclass(frozen=True)
class MeasurementPlan:
    """Parameters of a measurement."""

    k: int
    seed: int = 0
    epsilon: float | None = None
    """ε of the censor to simulate, or None for no censor"""
    show: bool = False
    draws: int = DRAWS


def measure(victim: Policy, adversary: Adversary, questions: Sequence[Question], plan: MeasurementPlan) -> Leakage:
    """Measure the leakage of the victim's replies per question, largest first.

    :raises UserError: if a question or a transcript is longer than a model reads.
    """
    texts = [text for question in questions for text in _prompts(question, plan.k)]
    drawn = iter(draw_replies(victim, texts, plan.draws, plan.seed))
    results = []
    for question in questions:
        replies_to = {text: next(drawn) for text in dict.fromkeys(_prompts(question, plan.k))}
        results.append(_measure_question(question, adversary, replies_to, plan))
    results.sort(key=lambda leaked: -leaked.leak.mean)
    return Leakage(adversary=adversary.name, k=plan.k, draws=plan.draws, epsilon=plan.epsilon, questions=results)


def _prompts(question: Question, k: int) -> list[str]:
    parts = [part.ask for part in question.parts[:k]]
    return list(dict.fromkeys([question.text, *question.paraphrases, *parts]))


class _Beliefs:
    """Beliefs about one question's transcripts, each read once."""

    def __init__(self, question: Question, adversary: Adversary, transcripts: Sequence[Transcript]) -> None:
        every = list(dict.fromkeys([(), *transcripts]))
        self._by_transcript = dict(zip(every, adversary.beliefs(question, every), strict=True))
        self._answer = question.answer
        self.prior = max(MIN_BELIEF, self._by_transcript[()][self._answer])

    def right(self, transcript: Transcript) -> float:
        return self._by_transcript[transcript][self._answer]

    def leak(self, transcript: Transcript) -> float:
        return leak(self.prior, min(1.0, self.right(transcript)))

    def guessed(self, transcript: Transcript) -> float:
        """Return the probability that the most likely option is the right one; ties are broken at random."""
        result = self._by_transcript[transcript]
        ties = [math.isclose(belief, max(result), rel_tol=1e-9) for belief in result]
        return ties[self._answer] / sum(ties)

    def point(self, transcripts: Sequence[Transcript]) -> LeakPoint:
        return LeakPoint(leak=_mean(self.leak, transcripts), guessed=_mean(self.guessed, transcripts))


def _measure_question(
    question: Question, adversary: Adversary, replies_to: Mapping[str, Sequence[str]], plan: MeasurementPlan
) -> Leaked:
    parts, draws = question.parts[: plan.k], range(plan.draws)
    direct = [(Turn(None, question.text, replies_to[question.text][draw]),) for draw in draws]
    others = [tuple(Turn(None, text, replies_to[text][draw]) for text in question.paraphrases) for draw in draws]
    whole = [tuple(Turn(n, part.ask, replies_to[part.ask][draw]) for n, part in enumerate(parts)) for draw in draws]
    some = [] if plan.epsilon is None else whole[: max(1, MAX_TRANSCRIPTS >> plan.k)]
    sets = [_subsets(transcript) for transcript in some]
    prefixes = [transcript[:length] for transcript in whole for length in range(plan.k + 1)]
    every = [*direct, *others, *prefixes, *(one for each in sets for one in each)]
    beliefs = _Beliefs(question, adversary, every)
    use = statistics.fmean(_is_useful(part, reply, question) for part in parts for reply in replies_to[part.ask])
    return Leaked(
        name=question.name,
        location=question.location,
        options=len(question.options),
        prior=beliefs.prior,
        posterior=_mean(beliefs.right, whole),
        leak=estimate([beliefs.leak(transcript) for transcript in whole]),
        guessed=_mean(beliefs.guessed, whole),
        direct=beliefs.point(direct),
        paraphrased=beliefs.point(others) if question.paraphrases else None,
        use=use,
        curve=[beliefs.point([transcript[:length] for transcript in whole]) for length in range(1, plan.k + 1)],
        behind=None if plan.epsilon is None else _behind_censor(question, beliefs, sets, use, plan.epsilon),
        replies=[(turn.ask, turn.reply) for turn in whole[0]] if plan.show else [],
    )


def _behind_censor(
    question: Question, beliefs: _Beliefs, sets: Sequence[Sequence[Transcript]], use: float, epsilon: float
) -> BehindCensor:
    """Return the leakage behind the censor, which empties each reply with the same probability."""
    silent = silence_probability(max_leakage(1 / len(question.options)), epsilon)
    leaks, guesses = (
        statistics.fmean(censored_mean([value(transcript) for transcript in each], silent) for each in sets)
        for value in (beliefs.leak, beliefs.guessed)
    )
    return BehindCensor(leak=leaks, guessed=guesses, silent=silent, use=(1 - silent) * use)


def _subsets(transcript: Transcript) -> list[Transcript]:
    """Return all subsets, by bit mask."""
    return [
        tuple(turn for index, turn in enumerate(transcript) if mask >> index & 1)
        for mask in range(1 << len(transcript))
    ]


def _is_useful(part: QuestionPart, reply: str, question: Question) -> bool:
    """Return whether the reply answers an honest question for this part."""
    return (
        stated_value(reply, part.right_replies) == normalize(part.right_replies[question.answer])
        if part.right_replies
        else bool(normalize(reply))
    )


def _mean(value: Callable[[Transcript], float], transcripts: Sequence[Transcript]) -> float:
    return statistics.fmean(map(value, transcripts))
