"""`python -m tests.engine.learner.train_ranks STAGE FIRST END CHECKPOINT OUT`: steps of one stage on all ranks that torchrun starts.

Resumes from CHECKPOINT unless it is empty, and leaves parameters.pt, metrics.json and a checkpoint in OUT.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from configs.schema import RunConfig
from engine.learner.distributed import gather_full_parameters, join_ranks, leave_ranks, wait_at_barrier
from engine.learner.trainer import Trainer
from engine.model.hf_checkpoint import load_model
from engine.model.qwen3 import Qwen3
from tests.engine.learner.training_examples import rl_sequences, sequences, small_run, trainable_model
from tests.engine.tiny_models import write_tokenizer

SFT_STAGES = ("sft", "experts")
Step = Callable[[Trainer, int], dict[str, float]]


def steps_of(stage: str) -> Step:
    if stage in SFT_STAGES:
        return lambda trainer, step: trainer.run_sft_step(sequences(step))
    return lambda trainer, step: trainer.run_rl_step(rl_sequences(step))


def make_run(stage: str) -> RunConfig:
    """`stage`: sft, rl, recomputed: rl with recomputed log probabilities, or experts: sft of a model with experts."""
    return small_run(old_logprobs="recomputed", correction="tis") if stage == "recomputed" else small_run()


def make_model(stage: str) -> Qwen3:
    return trainable_model("qwen3_moe" if stage == "experts" else "qwen3")


def main(stage: str, first: str, end: str, checkpoint: str, out: str) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks()
    model = load_model(checkpoint) if checkpoint else make_model(stage)
    trainer = Trainer(model, make_run(stage), ranks)
    if checkpoint:
        trainer.load(Path(checkpoint))
    else:
        trainer.start_stage("sft" if stage in SFT_STAGES else "rl")
    metrics = [steps_of(stage)(trainer, step) for step in range(int(first), int(end))]
    parameters = gather_full_parameters(trainer.model)
    folder = Path(out)
    if ranks.is_leader:
        write_tokenizer(folder / "tokenizer")
        torch.save(parameters, folder / "parameters.pt")
        (folder / "metrics.json").write_text(json.dumps(metrics))
    wait_at_barrier(ranks)
    trainer.save(folder / "checkpoint", folder / "tokenizer")
    leave_ranks(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
