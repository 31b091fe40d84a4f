"""Checks the learner on a device: steps against the CPU, its offload, and its collectives."""

import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asterism.configs.schema.algorithm import RlConfig, SftConfig
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import replace_keys
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence
from asterism.engine.learner.distributed import (
    RankGroup,
    all_reduce,
    find_non_finite_parameter,
    gather_full_parameters,
    get_local,
    join_ranks,
)
from asterism.engine.learner.sharding import load_sharded_model
from asterism.engine.learner.state_offload import StateOffload
from asterism.engine.learner.trainer import Trainer
from benchmarks.gpu.checks.measured import FLOAT32_LIMIT, Measured, compute_relative_error, count_differing
from benchmarks.gpu.checks.model_checks import VOCABULARY, build_small_config, build_small_model, write_small_checkpoint

_LENGTHS = (200, 3, 57, 120, 31, 90)
# AdamW divides by the size of the gradient, so a gradient of almost 0 changes its weight by the sign of its rounding
# error. Measured on a CPU: float32 differs from float64 by 1.1e-4.
_CHANGE_LIMIT = 2e-3
_COLD_START_LIMIT = 1e-2  # relative error of losses and norms in bfloat16; a CPU reaches 4e-4


def make_run(device: torch.device, stage: str, **learner: Any) -> RunConfig:
    """Make a run of few steps with a high learning rate and several micro batches per step."""
    settings: dict[str, Any] = {"optimizer.lr": 1e-3, "optimizer.warmup_steps": 0, "memory.micro_batch_tokens": 256}
    settings |= {"device": "cuda" if device.type == "cuda" else "cpu", "loss.mismatch_limit": 0.0}
    settings |= {"loss.old_logprobs": "engine", "loss.correction": "none"}
    shares_gpu = learner.get("memory.offload") == "between_steps"
    return RunConfig(
        name="check",
        sft=SftConfig(steps=4 if stage == "sft" else 0, warmup_steps=0, lr=1e-3),
        rl=RlConfig(steps=4),
        engine=EngineConfig(kind="sglang" if shares_gpu else "embedded"),
        sglang=SGLangConfig(colocate=shares_gpu),
        learner=replace_keys(LearnerConfig(), settings | learner),
    )


@contextmanager
def training(run: RunConfig) -> Generator[tuple[Trainer, RankGroup]]:
    """Yield a trainer of the small model, and its ranks. They join and load the model as in the learner."""
    ranks = join_ranks(run.learner)
    try:
        with tempfile.TemporaryDirectory() as name:
            write_small_checkpoint(Path(name))
            model = load_sharded_model(Path(name), ranks, run.learner.dtype)
        yield Trainer(model, run, ranks), ranks
    finally:
        if ranks.mesh is not None:
            dist.destroy_process_group()


def make_sequences() -> list[TrainingSequence]:
    draws = np.random.default_rng(0)
    sequences: list[TrainingSequence] = []
    for number, length in enumerate(_LENGTHS):
        ids = draws.integers(0, VOCABULARY, length, dtype=np.int32)
        mask = draws.random(length) < 0.7
        mask[0], mask[-1] = False, True
        logprobs = np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32)
        sequences.append(build_training_sequence(ids, mask, logprobs, float(draws.normal()), number // 2, number))
    return sequences


def check_trainer_step(device: torch.device) -> Iterator[Measured]:
    """Compare a GRPO step in float32 with the same step on the CPU: eager layers, and on a GPU also compiled layers.

    With two minibatches, the second gradient depends on the first update.
    """
    expected = _run_rl_step(torch.device("cpu"), is_compiled=False)
    for kind in ("eager", "compiled") if device.type == "cuda" else ("eager",):
        found = _run_rl_step(device, is_compiled=kind == "compiled")
        for name in ("loss", "grad_norm", "entropy"):
            error = abs(found[0][name] - expected[0][name]) / abs(expected[0][name])
            yield Measured(f"{kind}: {name}", error, FLOAT32_LIMIT)
        yield Measured(f"{kind}: change of weights", compute_relative_error(found[1], expected[1]), _CHANGE_LIMIT)


def _run_rl_step(device: torch.device, *, is_compiled: bool) -> tuple[dict[str, float], Tensor]:
    """Return the metrics of the step, and the change of all weights."""
    with training(make_run(device, "rl", minibatches=2, compile=is_compiled)) as (trainer, _):
        before = _flatten(gather_full_parameters(trainer.model).values())
        metrics = trainer.run_rl_step(make_sequences())
        return metrics, _flatten(gather_full_parameters(trainer.model).values()) - before


def _flatten(tensors: Any) -> Tensor:
    return torch.cat([each.flatten().double() for each in tensors])


def check_cold_start(device: torch.device) -> Iterator[Measured]:
    """Compare bfloat16 steps with float32 steps on the CPU: a rank without FSDP units, then a rank with FSDP units."""
    expected = _run_sft_steps(make_run(torch.device("cpu"), "sft"))
    for kind, offload in (("whole", "none"), ("sharded", "optimizer")):
        found = _run_sft_steps(make_run(device, "sft", dtype="bfloat16", **{"memory.offload": offload}))
        for number, (ours, reference) in enumerate(zip(found, expected, strict=True), start=1):
            for name in ("loss", "grad_norm"):
                error = abs(ours[name] - reference[name]) / abs(reference[name])
                yield Measured(f"{kind}: {name} of step {number}", error, _COLD_START_LIMIT)


def _run_sft_steps(run: RunConfig) -> list[dict[str, float]]:
    with training(run) as (trainer, _):
        return [trainer.run_sft_step(make_sequences()) for _ in range(2)]


def check_offload(device: torch.device) -> Iterator[Measured]:
    """Check that weights and moments keep their bits while they are in main memory between two steps in bfloat16."""
    run = make_run(device, "rl", dtype="bfloat16", compile=False, **{"memory.offload": "between_steps"})
    with training(run) as (trainer, ranks):
        trainer.run_rl_step(make_sequences())
        offload = StateOffload(run, ranks)
        before = [get_local(each).cpu().clone() for each in trainer.collect_state()]
        storages = [get_local(each).untyped_storage() for each in _on_device(trainer.collect_state(), device)]
        offload.release(trainer.collect_state)
        yield Measured("bytes left on the device", float(sum(each.nbytes() for each in storages)), 0.0)
        offload.restore()
        after = [get_local(each) for each in trainer.collect_state()]
        yield Measured("differing elements", float(count_differing(after, before)), 0.0)
        metrics = trainer.run_rl_step(make_sequences())
        yield Measured("later steps without a finite loss", float(not np.isfinite(metrics["loss"])), 0.0)


def _on_device(state: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Select the tensors on the device. AdamW keeps its step counts in main memory."""
    return [each for each in state if each.device.type == device.type]


def check_collectives(device: torch.device) -> Iterator[Measured]:
    """Check sum and maximum in the group of a single rank with FSDP units (NCCL on a GPU)."""
    with training(make_run(device, "rl", dtype="bfloat16", **{"memory.offload": "optimizer"})) as (_, ranks):
        assert ranks.tensor_group is not None
        for name, operation in (("sum", dist.ReduceOp.SUM), ("maximum", dist.ReduceOp.MAX)):
            values = torch.arange(1000, dtype=torch.float64, device=device)
            reduced = all_reduce(ranks, values.clone(), operation)
            yield Measured(name, float(count_differing([reduced.float()], [values.float()])), 0.0)


def check_non_finite(device: torch.device) -> Iterator[Measured]:
    """Check the reported name if no parameter, the last one or the first one has a NaN or an infinity."""
    model, ranks = build_small_model(build_small_config()).to(device), RankGroup(device=device)
    names = [name for name, _ in model.named_parameters()]
    yield Measured("finite weights that have a name", float(find_non_finite_parameter(model, ranks) is not None), 0.0)
    for place, name, value in (("last", names[-1], float("nan")), ("first", names[0], float("-inf"))):
        with torch.no_grad():
            model.get_parameter(name).view(-1)[-1] = value
        found = find_non_finite_parameter(model, ranks)
        yield Measured(f"wrong name of the {place} parameter", float(found != name), 0.0)
