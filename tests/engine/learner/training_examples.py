"""Random sequences and rows for tests of the trainer and of the learner."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from asterism.bus.messages import BatchGroup, BatchReady, GroupAccepted, TokenRecord, TrainingSample
from asterism.configs.schema.algorithm import RlConfig, SftConfig
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.batches.sample_files import StoredSequence, list_sequences
from asterism.engine.learner.batches.training_sequence import (
    TrainingSequence,
    build_rl_sequence,
    build_training_sequence,
)
from asterism.engine.learner.distributed import RankGroup, gather_full, gather_full_parameters
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.learner.learner_settings import make_learner
from tests.engine.tiny_models import VOCABULARY, save_small_model, small_architecture, small_model

torch.set_num_threads(1)  # more threads slow small products down


def small_run(**learner: Any) -> RunConfig:
    """Configure a run with several micro batches. Its learning rates are high, so that a wrong update is visible."""
    settings = {
        "lr": 1e-3,
        "warmup_steps": 2,
        "micro_batch_tokens": 128,
        "minibatches": 2,
        "threads": 1,
        "mismatch_limit": 0.0,
    } | learner
    offload = learner.get("offload", "none")
    is_shared = offload == "between_steps"
    optimizer = "adamw" if offload == "optimizer" else "muon"
    return RunConfig(
        name="small",
        seed=3,
        sft=SftConfig(steps=10, warmup_steps=2, batch_size=12, lr=3e-3, optimizer=optimizer, muon_lr=0.02),
        rl=RlConfig(steps=6),
        engine=EngineConfig(kind="sglang" if is_shared else "embedded"),
        sglang=SGLangConfig(colocate=is_shared),
        learner=make_learner(**settings),
    )


def trainable_model(model_type: str = "qwen3", *, is_tied: bool = True) -> CausalLM:
    return small_model(config=small_architecture(model_type, tie_word_embeddings=is_tied)).requires_grad_(True)


def make_trainer(stage: str = "rl", model: CausalLM | None = None, **learner: Any) -> Trainer:
    """Make a trainer on one rank, at the start of this stage. `learner`: settings of [learner]."""
    made = Trainer(trainable_model() if model is None else model, small_run(**learner), RankGroup())
    made.start_stage("sft" if stage == "sft" else "rl")
    return made


class RecordingTrainer(Trainer):
    """A trainer that keeps the gradients of its first update."""

    gradients: dict[str, Tensor] | None = None
    gradient_dtypes: set[str]

    def _apply_gradients(self, lr_scale: float) -> float:
        pairs = [(name, each.grad) for name, each in self.model.named_parameters() if each.grad is not None]
        if self.gradients is None:
            self.gradients = {name: gather_full(gradient).clone() for name, gradient in pairs}
        self.gradient_dtypes = {str(gradient.dtype) for _, gradient in pairs}
        return super()._apply_gradients(lr_scale)


def copy_weights(made: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in gather_full_parameters(made.model).items()}


def row(
    trajectory_id: int, group_id: int, seed: int, advantage: float | None = None, version: int = 0
) -> TrainingSample:
    draws = np.random.default_rng((seed, trajectory_id))
    length = int(draws.integers(6, 40))
    mask = draws.random(length) < 0.6
    mask[-1] = True
    logprobs = np.where(mask, -6 * draws.random(length), 0).astype(np.float32)
    return TrainingSample(
        trajectory_id=trajectory_id,
        group_id=group_id,
        advantage=float(draws.normal()) if advantage is None else advantage,
        record=TokenRecord(
            prompt_tokens=3,
            token_ids=draws.integers(0, VOCABULARY, length, dtype=np.int32).tobytes(),
            loss_mask=mask.astype(np.uint8).tobytes(),
            logprobs=logprobs.tobytes(),
            versions=np.where(mask, version, -1).astype(np.int32).tobytes(),
        ),
    )


def replace_tokens(sample: TrainingSample, **changes: bytes) -> TrainingSample:
    return replace(sample, record=replace(sample.record, **changes))


def rows(step: int, groups: int = 5, size: int = 4) -> list[TrainingSample]:
    """Return the step's rows. Their versions are those of the synchronous algorithm."""
    version = max(step - 1, 0)
    numbers = range(groups * size)
    return [row(number, number // size, step, version=version) for number in numbers]


def rl_sequences(step: int, groups: int = 5, size: int = 4) -> list[TrainingSequence]:
    return [build_rl_sequence(each) for each in rows(step, groups, size)]


def sibling_sequences(step: int, groups: int = 4, size: int = 6) -> list[TrainingSequence]:
    """Make groups whose sequences have a common prompt of at least 20 tokens. Some have one token after the prompt."""
    draws = np.random.default_rng(step)
    found: list[TrainingSequence] = []
    for number in range(groups * size):
        group = number // size
        prompt = np.random.default_rng((step, group)).integers(0, VOCABULARY, 20 + group, dtype=np.int32)
        response = draws.integers(0, VOCABULARY, int(draws.integers(1, 30)), dtype=np.int32)
        mask = np.concatenate((np.zeros(len(prompt), np.bool_), draws.random(len(response)) < 0.7))
        mask[[len(prompt), -1]] = True
        token_ids, logprobs = np.concatenate((prompt, response)), -6 * draws.random(len(mask), np.float32)
        found.append(build_training_sequence(token_ids, mask, logprobs, float(draws.normal()), group, number))
    return found


def batch_messages(step: int, samples: Sequence[TrainingSample]) -> list[GroupAccepted | BatchReady]:
    """Return the messages that the group buffer sends: one for each group, and then BatchReady."""
    groups: dict[int, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    accepted = [GroupAccepted(step, group_id, 0, tuple(group)) for group_id, group in groups.items()]
    return [*accepted, BatchReady(step, tuple(BatchGroup(group_id, 1) for group_id in sorted(groups)))]


def store_batch(folder: Path, step: int, samples: Sequence[TrainingSample]) -> list[StoredSequence]:
    journal = BatchJournal(folder)
    *groups, batch = batch_messages(step, samples)
    for group in groups:
        assert isinstance(group, GroupAccepted)
        journal.write_group(group)
    assert isinstance(batch, BatchReady)
    return list_sequences(journal.read_indexes(batch))


def sequences(step: int, count: int = 12) -> list[TrainingSequence]:
    draws = np.random.default_rng(step)
    lengths = draws.integers(6, 40, count)
    return [
        build_training_sequence(
            draws.integers(0, VOCABULARY, length, dtype=np.int32),
            draws.random(length) < 0.6,
            np.zeros(length, np.float32),
            1.0,
        )
        for length in lengths
    ]


def write_initial_checkpoint(folder: Path) -> None:
    """Write a transformers folder with a model and its tokenizer."""
    save_small_model(folder.parent, name=folder.name)
