"""Measure how much longer training steps take if each of them saves a checkpoint. Prints a JSON line last.

    python -m benchmarks.checkpoints [--quick] [--rounds N] [--steps N] [--model tiny,small]

One rank trains on random rows. Rounds of steps without a checkpoint alternate with rounds in which each step saves one
with an export. The time of a round includes the waits for earlier checkpoints; the last checkpoint counts in
full, although no step follows. Ratios are medians of the rounds' ratios. The CPU seconds do not depend on other load.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from asterism.configs.schema.learner_config import LearnerConfig, LossConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.model_config import DecoderConfig
from asterism.policies.dialogue.chat_format import TURN_END
from benchmarks.support.benchmark_main import Flag, Options, alternate, benchmark_main, choose_names

VOCABULARY = 560
TOKENS = 100  # tokens per row


class TrainedModel(NamedTuple):
    width: int
    layers: int
    rows: int  # rows per step


MODELS = {
    "tiny": TrainedModel(width=96, layers=4, rows=256),  # about the size of the demo's model, with the rows of its step
    "small": TrainedModel(width=512, layers=6, rows=64),  # 21M parameters
}


class RoundTimes(NamedTuple):
    wall_s: float  # seconds per step
    cpu_s: float


def make_trainer(trained: TrainedModel) -> Trainer:
    run = RunConfig(name="checkpoints")
    run = replace(run, learner=LearnerConfig(threads=torch.get_num_threads(), loss=LossConfig(mismatch_limit=0.0)))
    model = CausalLM(
        DecoderConfig(
            vocab_size=VOCABULARY,
            hidden_size=trained.width,
            intermediate_size=3 * trained.width,
            num_layers=trained.layers,
            num_heads=trained.width // 32,
            num_kv_heads=trained.width // 32,
            head_dim=32,
        )
    )
    initialize_weights(model, seed=0)
    trainer = Trainer(model, run, RankGroup())
    trainer.start_stage("rl")
    return trainer


def make_sequences(rows: int) -> list[TrainingSequence]:
    draws = np.random.default_rng(0)
    return [
        build_training_sequence(
            draws.integers(0, VOCABULARY, TOKENS, dtype=np.int32),
            np.arange(TOKENS) >= TOKENS // 4,
            np.full(TOKENS, -6.0, np.float32),
            float(draws.normal()),
        )
        for _ in range(rows)
    ]


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True)
    words = {TURN_END: 0} | {f"word{number}": number for number in range(1, VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token=TURN_END)).save(str(folder / "tokenizer.json"))
    return folder


def run_round(trainer: Trainer, sequences: list[TrainingSequence], steps: int, out: Path | None) -> RoundTimes:
    """Run the steps of a round. `out` is the folder for a checkpoint of each step; None: no checkpoints."""
    began = time.perf_counter(), time.process_time()
    for step in range(steps):
        trainer.run_rl_step(sequences)
        if out is not None:
            trainer.save(out / f"step_{step:06d}", out / "tokenizer")
    trainer.finish_saving()
    return RoundTimes((time.perf_counter() - began[0]) / steps, (time.process_time() - began[1]) / steps)


def measure_model(name: str, rounds: int, steps: int, out: Path) -> dict[str, float]:
    trained = MODELS[name]
    trainer, sequences = make_trainer(trained), make_sequences(trained.rows)
    write_tokenizer(out / "tokenizer")
    run_round(trainer, sequences, 1, out)  # the first checkpoint imports modules
    folders = {"plain": None, "saving": out}
    ways = {way: partial(run_round, trainer, sequences, steps, folder) for way, folder in folders.items()}
    taken = list(zip(*alternate(ways, rounds).values(), strict=True))
    return {
        f"parameters_{name}": sum(parameter.numel() for parameter in trainer.model.parameters()),
        f"step_s_{name}": median(plain.wall_s for plain, _ in taken),
        f"step_saving_s_{name}": median(saving.wall_s for _, saving in taken),
        f"ratio_{name}": median(saving.wall_s / plain.wall_s for plain, saving in taken),
        f"save_cpu_s_{name}": median(saving.cpu_s - plain.cpu_s for plain, saving in taken),
        f"cpu_ratio_{name}": median(saving.cpu_s / plain.cpu_s for plain, saving in taken),
    }


def measure(options: Options) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in choose_names(options.model, list(MODELS), "--model: "):
        figures |= measure_model(name, options.rounds, options.steps, options.scratch / name)
    return figures


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--rounds", 5, quick=1),
        Flag("--steps", 4, "steps of a round", quick=1),
        Flag("--model", "tiny,small", "one or several models", quick="tiny"),
        quick="one round of one step with the tiny model",
        shows_table=True,
    )
