"""Measure how much longer training steps take if each of them saves a checkpoint. Prints a JSON line last.

    python -m benchmarks.checkpoints [--quick] [--rounds N] [--steps N] [--model tiny,small]

One rank trains on random rows. Rounds of steps without a checkpoint alternate with rounds in which each step saves one
with an export. The time of a round includes the waits for earlier checkpoints; the last checkpoint counts in
full, although no step follows. Ratios are medians of the rounds' ratios. The CPU seconds do not depend on other load.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from asterism.configs.schema.learner_config import LearnerConfig, LossConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.model_config import DecoderConfig
from asterism.policies.dialogue.chat_format import TURN_END

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
    folder.mkdir()
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


def measure(name: str, rounds: int, steps: int) -> dict[str, float]:
    trained = MODELS[name]
    trainer, sequences = make_trainer(trained), make_sequences(trained.rows)
    taken: list[tuple[RoundTimes, RoundTimes]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        write_tokenizer(out / "tokenizer")
        run_round(trainer, sequences, 1, out)  # the first checkpoint imports modules
        for _ in range(rounds):
            plain = run_round(trainer, sequences, steps, None)
            taken.append((plain, run_round(trainer, sequences, steps, out)))
    return {
        f"parameters_{name}": _count_parameters(trainer.model),
        f"step_s_{name}": median(plain.wall_s for plain, _ in taken),
        f"step_saving_s_{name}": median(saving.wall_s for _, saving in taken),
        f"ratio_{name}": median(saving.wall_s / plain.wall_s for plain, saving in taken),
        f"save_cpu_s_{name}": median(saving.cpu_s - plain.cpu_s for plain, saving in taken),
        f"cpu_ratio_{name}": median(saving.cpu_s / plain.cpu_s for plain, saving in taken),
    }


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--model", default="tiny,small", help="one or several of " + ", ".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="one round of one step with the tiny model")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.model = 1, 1, "tiny"
    figures: dict[str, float] = {}
    for name in options.model.split(","):
        figures |= measure(name, options.rounds, options.steps)
    for name, value in figures.items():
        print(f"{name:24} {value:,.4g}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
