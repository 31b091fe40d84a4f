"""Kinds of generated tokens, and statistics of their entropies.

    reasoning   text before the first tool result
    reflection  text of a turn that follows a tool result
    call        a tool call with its tags
    answer      the final answer with its tags

Tokens of high entropy, the forking tokens, decide how a response continues (Wang et al. 2025, arXiv 2506.01939). rStar2-Agent
adds tokens that reflect on tool results (arXiv 2508.20722, section 5).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

Kind = Literal["reasoning", "reflection", "call", "answer"]
KINDS: tuple[Kind, ...] = ("reasoning", "reflection", "call", "answer")
FORKING_SHARE = 0.2  # share of the tokens, with the highest entropies, that are forking tokens
MAX_COMMON_TEXTS = 12


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    text: str
    kind: Kind | None = None  # None: the model did not generate the token
    entropy: float = 0.0  # nats, of the distribution from which the token was sampled


class ScoredDialogue(msgspec.Struct, frozen=True):
    trajectory_id: int
    reward: float
    tokens: tuple[ScoredToken, ...]


class KindStatistics(msgspec.Struct, frozen=True):
    tokens: int
    mean_nats: float
    forking_tokens: int
    forking_share: float  # share of the kind's tokens
    common_forking_texts: tuple[tuple[str, int], ...]  # texts and their counts


class EntropyStatistics(msgspec.Struct, frozen=True):
    dialogues: int
    tokens: int  # number of generated tokens
    mean_nats: float
    forking_nats: float  # tokens with at least this entropy are forking
    kinds: dict[Kind, KindStatistics]
    lower_nats: tuple[float, ...]  # entropies that 0 %, 10 % ... 100 % of the tokens do not exceed


class TurnTags(msgspec.Struct, frozen=True):
    """Texts around calls and answers in a run's dialogues."""

    answers: tuple[tuple[str, str], ...]  # opening and closing text of each form of answer
    calls: tuple[tuple[str, str], ...]


def classify_turn(texts: Sequence[str], tags: TurnTags, *, follows_result: bool) -> list[Kind]:
    """Return the kind of each token of a turn. `texts` holds one text per token."""
    kinds: list[Kind] = ["reflection" if follows_result else "reasoning"] * len(texts)
    joined = "".join(texts)
    starts = np.cumsum([0, *(len(text) for text in texts)])
    blocks: tuple[tuple[Kind, str, str], ...] = (
        *(("answer", *answer) for answer in tags.answers),
        *(("call", *call) for call in tags.calls),  # last: code may contain the tags of an answer
    )
    for kind, opening, closing in blocks:
        for block in re.finditer(f"{re.escape(opening)}.*?(?:{re.escape(closing)}|$)", joined, re.DOTALL):
            first, last = np.searchsorted(starts, [block.start() + 1, block.end()]) - 1
            kinds[first : last + 1] = [kind] * (last + 1 - first)
    return kinds


def compute_statistics(dialogues: Sequence[ScoredDialogue]) -> EntropyStatistics:
    """Compute the statistics of all dialogues. Raises ValueError without a generated token."""
    generated = [token for dialogue in dialogues for token in dialogue.tokens if token.kind is not None]
    if not generated:
        raise ValueError("no generated token")
    entropies = np.array([token.entropy for token in generated])
    forking_nats = float(np.quantile(entropies, 1 - FORKING_SHARE, method="higher"))
    by_kind: defaultdict[Kind, list[ScoredToken]] = defaultdict(list)
    for token in generated:
        assert token.kind is not None
        by_kind[token.kind].append(token)
    return EntropyStatistics(
        dialogues=len(dialogues),
        tokens=len(generated),
        mean_nats=float(entropies.mean()),
        forking_nats=forking_nats,
        kinds={kind: _summarize(by_kind[kind], forking_nats) for kind in KINDS if by_kind[kind]},
        lower_nats=tuple(float(each) for each in np.quantile(entropies, np.linspace(0, 1, 11))),
    )


def _summarize(tokens: Sequence[ScoredToken], forking_nats: float) -> KindStatistics:
    forking = [token.text for token in tokens if token.entropy >= forking_nats]
    common = Counter(filter(None, forking)).most_common(MAX_COMMON_TEXTS)
    mean = float(np.mean([token.entropy for token in tokens]))
    return KindStatistics(len(tokens), mean, len(forking), len(forking) / len(tokens), tuple(common))
