"""Finds sequences with equal prompts, so that a micro batch computes the prompt once.

The prompt of a sequence has the tokens before its first token in the loss. Sequences are siblings if the token ids of
their prompts are equal, whatever their group. A single sequence has no shared prompt.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asterism.engine.learner.batches.training_sequence import Prompt, SequenceSource

MIN_SHARED_TOKENS = 8  # a shorter prompt is not shared: computing it again costs less than the calls of its siblings


class Siblings(NamedTuple):
    """Sequences that follow each other in a micro batch, after their shared prompt."""

    indices: Sequence[int]
    prompt_tokens: int  # tokens of the shared prompt; 0 for a single sequence
    own_tokens: Sequence[int]  # tokens of each sequence, without the shared prompt and without its last token

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + sum(self.own_tokens)

    def compute_cost(self, attention_tokens: float) -> float:
        """Return the cost of packing.py: T + T^2 / attention_tokens for a sequence; the part of the prompt counts once."""
        prompt = self.prompt_tokens
        of_responses = sum(own * (1 + (own + 2 * prompt) / attention_tokens) for own in self.own_tokens)
        return prompt * (1 + prompt / attention_tokens) + of_responses


def find_siblings(
    sequences: Sequence[SequenceSource], indices: Iterable[int], *, shares_prompts: bool
) -> list[Siblings]:
    """Group the sequences at `indices` by their prompts, in the order of each prompt's first sequence.

    Without `shares_prompts`, each sequence is alone.
    """
    by_prompt: defaultdict[Prompt | int, list[int]] = defaultdict(list)
    for index in indices:
        prompt = sequences[index].prompt if shares_prompts else Prompt()
        by_prompt[prompt if prompt.num_tokens >= MIN_SHARED_TOKENS else index].append(index)
    return [make_siblings(sequences, members) for members in by_prompt.values()]


def make_siblings(sequences: Sequence[SequenceSource], indices: Sequence[int]) -> Siblings:
    """Make siblings of sequences with equal prompts, or of a single sequence."""
    shared = sequences[indices[0]].prompt.num_tokens if len(indices) > 1 else 0
    return Siblings(indices, shared, [sequences[index].num_tokens - 1 - shared for index in indices])
