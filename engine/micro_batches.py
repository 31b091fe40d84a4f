"""From sequences to the padded tensors of one forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batches import TrainingSequence


class MicroBatch(NamedTuple):
    """B sequences without their last token, padded on the right to T; N counted tokens in all of them."""

    token_ids_BT: Tensor  # int64
    positions_N: Tensor  # int64, into the flattened [B * T]: where the hidden state stands that predicts the token
    targets_N: Tensor  # int64
    logprobs_N: Tensor
    advantages_N: Tensor


def micro_batch(sequences: Sequence[TrainingSequence]) -> MicroBatch:
    """Pad and gather. No sequence at all gives one padding token and nothing counted, so that a rank without work can
    still take part in its step's collectives."""
    width = max((len(sequence.token_ids) - 1 for sequence in sequences), default=1)
    token_ids_BT = np.zeros((max(1, len(sequences)), width), np.int64)
    positions: list[NDArray[np.int64]] = []
    for row, sequence in enumerate(sequences):
        token_ids_BT[row, : len(sequence.token_ids) - 1] = sequence.token_ids[:-1]
        positions.append(np.flatnonzero(sequence.loss_mask) - 1 + row * width)
    targets = [sequence.token_ids[sequence.loss_mask] for sequence in sequences]
    logprobs = [sequence.logprobs[sequence.loss_mask] for sequence in sequences]
    advantages = [np.full(sequence.counted, sequence.advantage, np.float32) for sequence in sequences]
    return MicroBatch(
        torch.from_numpy(token_ids_BT),
        _joined(positions, np.int64),
        _joined(targets, np.int64),
        _joined(logprobs, np.float32),
        _joined(advantages, np.float32),
    )


def _joined(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([*parts, np.zeros(0, dtype)], dtype=dtype))
