"""The sequences that the learner trains on, in memory or in files."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from asterism.bus.messages import TrainingSample


class Prompt(NamedTuple):
    """The identity of a sequence's prompt, the tokens before its first token in the loss.

    Prompts with equal digests have equal token ids.
    """

    num_tokens: int = 0
    digest: bytes = b""


class SequenceSource(Protocol):
    """A training sequence, in memory or in a file."""

    @property
    def trajectory_id(self) -> int: ...
    @property
    def group_id(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """The number of tokens from the prompt's first token to the last loss token."""
        ...

    @property
    def num_loss_tokens(self) -> int: ...
    @property
    def token_id_range(self) -> tuple[int, int]:
        """The lowest and the highest token id; (0, 0) without tokens."""
        ...

    @property
    def prompt(self) -> Prompt: ...

    def load(self) -> "TrainingSequence": ...


_DIGEST_BYTES = 16
Source = TypeVar("Source", bound=SequenceSource)
RankShares = Sequence[Sequence[Sequence[int]]]  # for each rank the micro batches of a minibatch, as lists of indices


class TrainingSequence(NamedTuple):
    """A sequence of T tokens, including the prompt."""

    token_ids: NDArray[np.int32]  # [T]; the last token is in the loss
    loss_mask: NDArray[np.bool_]  # [T]; false for the first token, which has no prediction
    logprobs: NDArray[np.float32]  # [T], under the policy that generated the token; zeros in the cold start
    advantage: float
    group_id: int = 0
    trajectory_id: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def token_id_range(self) -> tuple[int, int]:
        return int(self.token_ids.min(initial=0)), int(self.token_ids.max(initial=0))

    @property
    def prompt(self) -> Prompt:
        end = int(self.loss_mask.argmax()) if self.loss_mask.any() else 0
        return Prompt(end, hashlib.blake2b(self.token_ids[:end].tobytes(), digest_size=_DIGEST_BYTES).digest())

    def load(self) -> "TrainingSequence":
        return self


def check_token_ids(sequences: Iterable[SequenceSource], vocab_size: int) -> None:
    """Raise ValueError with the trajectory for a token id outside the vocabulary."""
    for sequence in sequences:
        lowest, highest = sequence.token_id_range
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"trajectory {sequence.trajectory_id}: a token id is outside the vocabulary of {vocab_size}"
            )


def build_training_sequence(
    token_ids: NDArray[np.int32],
    loss_mask: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
    advantage: float,
    group_id: int = 0,
    trajectory_id: int = 0,
) -> TrainingSequence:
    """Build a sequence up to the last loss token. Raises ValueError if the arrays differ in length."""
    if not len(token_ids) == len(loss_mask) == len(logprobs):
        raise ValueError(f"{len(token_ids)} token ids, {len(loss_mask)} mask entries, {len(logprobs)} logprobs")
    counted = loss_mask.copy()
    counted[:1] = False
    end = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return TrainingSequence(token_ids[:end], counted[:end], logprobs[:end], advantage, group_id, trajectory_id)


def build_sft_sequence(token_ids: Iterable[int], loss_mask: Iterable[int | bool]) -> TrainingSequence:
    ids = np.fromiter(token_ids, np.int32)
    return build_training_sequence(ids, np.fromiter(loss_mask, np.bool_), np.zeros(len(ids), np.float32), 1.0)


def build_rl_sequence(sample: TrainingSample) -> TrainingSequence:
    """Build a sequence. Raises ValueError with the trajectory if the sample's arrays differ in length."""
    try:
        return build_training_sequence(
            np.frombuffer(sample.record.token_ids, "<i4"),
            np.frombuffer(sample.record.loss_mask, np.uint8).astype(np.bool_),
            np.frombuffer(sample.record.logprobs, "<f4"),
            sample.advantage,
            sample.group_id,
            sample.trajectory_id,
        )
    except ValueError as error:
        raise ValueError(f"trajectory {sample.trajectory_id}: {error}") from error
