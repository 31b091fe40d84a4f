"""Trains with transformers in padded micro batches, for comparison in benchmarks.learner."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.batches.training_sequence import TrainingSequence

IGNORED = -100  # label of a token without loss


class PaddedTraining:
    """Training with the model's own code and loss, clipping, and AdamW."""

    def __init__(
        self, config: DecoderConfig, micro_batch_tokens: int, *, is_sorted: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        """If `is_sorted`, a micro batch has sequences of similar length; otherwise sequences keep their order.

        `dtype` is that of products, as torch.autocast chooses them; weights and optimizer are float32.
        """
        fields = config.to_hf()
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
        self._model = model.train()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
        self._most_tokens, self._is_sorted, self._dtype = micro_batch_tokens, is_sorted, dtype

    def run_step(self, sequences: Sequence[TrainingSequence]) -> None:
        num_items = sum(each.num_loss_tokens for each in sequences)
        for micro_batch in self._split(sequences):
            token_ids_BT, mask_BT, labels_BT = pad(micro_batch)
            with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
                found = self._model(
                    input_ids=token_ids_BT, attention_mask=mask_BT, labels=labels_BT, num_items_in_batch=num_items
                )
            found.loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _split(self, sequences: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
        """Split sequences into micro batches with at most the given number of tokens, including padding."""
        ordered = sorted(sequences, key=lambda each: -each.num_tokens) if self._is_sorted else sequences
        micro_batches: list[list[TrainingSequence]] = [[]]
        for sequence in ordered:
            longest = max([sequence.num_tokens, *(each.num_tokens for each in micro_batches[-1])])
            if (len(micro_batches[-1]) + 1) * longest > self._most_tokens:
                micro_batches.append([])
            micro_batches[-1].append(sequence)
        return micro_batches


def pad(sequences: Sequence[TrainingSequence]) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, attention mask and labels; int64 [B, T], padded on the right."""
    shape = len(sequences), max(each.num_tokens for each in sequences)
    token_ids_BT, mask_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels_BT = np.full(shape, IGNORED, np.int64)
    for row, sequence in enumerate(sequences):
        columns = slice(sequence.num_tokens)
        token_ids_BT[row, columns] = sequence.token_ids
        mask_BT[row, columns] = 1
        labels_BT[row, columns] = np.where(sequence.loss_mask, sequence.token_ids, IGNORED)
    return torch.from_numpy(token_ids_BT), torch.from_numpy(mask_BT), torch.from_numpy(labels_BT)
