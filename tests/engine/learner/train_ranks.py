"""Runs scripts on all ranks. Each script has the steps of one stage."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.adapters.adapted_model import BasePolicy, start_from_model
from asterism.engine.learner.checkpoints.checkpoint_folders import FIRST_CHECKPOINT
from asterism.engine.learner.distributed import RankGroup, gather_full_parameters, wait_at_barrier
from asterism.engine.learner.sharding import build_sharded_model, shard_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.lora_linear import add_adapters, list_adapters
from asterism.engine.model.lora_options import get_lora_options
from asterism.policies.losses import token_scores
from tests.engine.learner.adapters.adapted_models import fill_adapters
from tests.engine.learner.rank_probes import ParameterForm, describe_parameters
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import (
    RecordingTrainer,
    rl_sequences,
    sequences,
    sibling_sequences,
    small_run,
    trainable_model,
)
from tests.engine.tiny_models import small_architecture, small_model, write_tokenizer

SFT_STAGES = ("sft", "experts")
Step = Callable[[Trainer, int], dict[str, float]]


class RankScript(msgspec.Struct, frozen=True):
    stage: str  # sft, rl, recomputed (rl with recomputed log probabilities), experts (sft of a model with experts),
    # adapted (rl with adapters that are added after a step of the cold start), siblings or sibling experts (rl with
    # common prompts)
    first: int = 0
    end: int = 3
    saved: str = ""  # folder for a final checkpoint, and for one of step 0 of a new model with adapters; empty: none
    max_shard_bytes: int = 5 * 10**9  # limit of a shard's size in the export
    checkpoint: str = ""  # checkpoint from which the script resumes; empty: a new model
    is_tied: bool = True  # whether the new model has tied embeddings
    learner: dict[str, Any] = {}  # settings of [learner]
    is_double: bool = False  # whether the new model computes in float64
    chunk_tokens: int = 0  # number of tokens whose logits are computed at once; 0: all


class Outcome(msgspec.Struct):
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]  # gradients of the first update, when all ranks still have equal weights
    metrics: list[dict[str, float]]
    parameter_forms: dict[str, ParameterForm]
    gradient_dtypes: set[str]  # dtypes of gradients in the last update
    optimizer_dtypes: set[str]  # dtypes of the optimizer's tensors


def steps_of(stage: str) -> Step:
    if stage in SFT_STAGES:
        return lambda trainer, step: trainer.run_sft_step(sequences(step))
    make = sibling_sequences if "sibling" in stage else rl_sequences
    return lambda trainer, step: trainer.run_rl_step(make(step))


def make_model(stage: str, *, is_tied: bool) -> CausalLM:
    if "sibling" in stage:  # smaller weights, so that rounding is below 1e-6 of the largest gradient
        config = small_architecture("qwen3_moe" if "experts" in stage else "qwen3", tie_word_embeddings=is_tied)
        return small_model(config=config, std=0.05).requires_grad_(True)
    return trainable_model("qwen3_moe" if stage == "experts" else "qwen3", is_tied=is_tied)


def make_trainer(script: RankScript, ranks: RankGroup) -> RecordingTrainer:
    recomputed = {"old_logprobs": "recomputed", "correction": "tis"} if script.stage == "recomputed" else {}
    run = small_run(**recomputed, **script.learner)
    lora = get_lora_options(run.learner)
    if script.checkpoint:
        model = build_sharded_model(Path(script.checkpoint), ranks, run.learner.dtype, lora)
    else:
        model = make_model(script.stage, is_tied=script.is_tied)
        if lora is not None and script.stage != "adapted":
            add_adapters(model, lora)
            fill_adapters(model)
        if script.is_double:
            model.double()
        shard_model(model, ranks, run.learner.dtype)
    trainer = RecordingTrainer(model, run, ranks)
    if script.checkpoint:
        trainer.load(Path(script.checkpoint))
    else:
        trainer.start_stage("sft" if script.stage in SFT_STAGES else "rl")
    if script.stage == "adapted":
        trainer = add_adapters_after_cold_start(trainer, ranks, run)
    if run.learner.loss.kl_coef:
        trainer.set_reference(BasePolicy(trainer.model))
    return trainer


def add_adapters_after_cold_start(trainer: RecordingTrainer, ranks: RankGroup, run: RunConfig) -> RecordingTrainer:
    trainer.start_stage("sft")
    trainer.run_sft_step(sequences(0))
    lora = get_lora_options(run.learner)
    assert lora is not None
    model = start_from_model(trainer.model, ranks, run.learner.dtype, lora, run.seed)
    fill_adapters(model)
    adapted = RecordingTrainer(model, run, ranks)
    adapted.start_stage("rl")
    return adapted


def run_script(ranks: RankGroup, script: RankScript) -> Outcome:
    if script.chunk_tokens:
        token_scores.count_chunk_tokens = lambda *_: script.chunk_tokens
    trainer, folder = make_trainer(script, ranks), Path(script.saved)
    if script.saved and ranks.is_leader:
        write_tokenizer(folder / "tokenizer")
    wait_at_barrier(ranks)
    if script.saved and list_adapters(trainer.model):
        trainer.save(folder / FIRST_CHECKPOINT, folder / "tokenizer")
    metrics = [steps_of(script.stage)(trainer, step) for step in range(script.first, script.end)]
    parameters = {name: each.clone() for name, each in gather_full_parameters(trainer.model).items()}
    if script.saved:
        trainer.save(folder / "checkpoint", folder / "tokenizer", max_shard_bytes=script.max_shard_bytes)
        trainer.finish_saving()
    states = [state for optimizer in trainer._optimizers for state in optimizer.state.values()]  # pyright: ignore[reportPrivateUsage]
    moments = {str(each.dtype) for state in states for name, each in state.items() if name != "step"}
    forms = describe_parameters(trainer.model)
    return Outcome(parameters, trainer.gradients or {}, metrics, forms, trainer.gradient_dtypes, moments)


def run_scripts(ranks: RankGroup, scripts: Sequence[RankScript]) -> list[Outcome]:
    """Run the scripts in order. The leading rank returns their outcomes."""
    warnings.filterwarnings("error", "FSDP2-wrapped module")  # this warning is about outputs that are views
    outcomes = [run_script(ranks, script) for script in scripts]
    return outcomes if ranks.is_leader else []


def train(count: int, *scripts: RankScript) -> list[Outcome]:
    """Run all scripts in one set of rank processes. A single rank without a mesh runs them in this process."""
    if count == 1 and scripts[0].learner.get("dtype", "float32") == "float32":
        return [run_script(RankGroup(), script) for script in scripts]
    return run_ranks(count, run_scripts, scripts, learner=small_run(**scripts[0].learner).learner)[0]
