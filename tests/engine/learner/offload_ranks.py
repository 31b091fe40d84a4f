"""`main(OUT, LEARNER)`: steps that free the memory of the device in between.

LEARNER is a JSON object with settings of [learner]. The checkpoint OUT/step_000002 starts before the state moves, the
checkpoints OUT/step_000003 and OUT/step_000004 start while it is moved. The state returns after the end of step 3's
save and during step 4's save. Each rank writes OUT/RANK.json, an OffloadReport; rank 0 also OUT/parameters.pt.
"""

from pathlib import Path

import msgspec
import torch
from torch import Tensor, UntypedStorage
from torch.distributed.fsdp import FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor

from asterism.engine.learner.distributed import gather_full_parameters, join_ranks, leave_ranks, wait_at_barrier
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.state_offload import StateOffload
from asterism.engine.learner.trainer import Trainer
from tests.engine.learner.training_examples import rl_sequences, small_run, trainable_model
from tests.engine.tiny_models import write_tokenizer

STEPS = 4
SAVED_BEFORE = 2
SAVED_WHILE_MOVED = (3, 4)


class OffloadReport(msgspec.Struct):
    state_bytes: list[int]  # state on the device after each step; empty: nothing moves
    resident_bytes: list[int]  # the same storages after the memory is released
    policies: list[str]  # offload policies of FSDP's units
    metrics: list[dict[str, float]]
    offload_metrics: list[str]


def get_storages(tensors: list[Tensor]) -> list[UntypedStorage]:
    return [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]


def list_policies(model: torch.nn.Module) -> list[OffloadPolicy]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for state in states if (group := state._fsdp_param_group) is not None]
    return [group.offload_policy for group in groups]


def train(out: Path, trainer: Trainer, offload: StateOffload, report: OffloadReport) -> None:
    storages: list[UntypedStorage] = []

    def collect() -> list[Tensor]:
        state = trainer.collect_state()
        with torch.no_grad():
            storages[:] = get_storages(state)
        report.state_bytes.append(sum(each.nbytes() for each in storages))
        return state

    for step in range(STEPS):
        offload.restore()
        report.metrics.append(trainer.run_rl_step(rl_sequences(step)))
        if trainer.step == SAVED_BEFORE:
            trainer.save(out / "step_000002", out / "tokenizer")
        offload.release(collect)
        report.resident_bytes.append(sum(each.nbytes() for each in storages))
        if trainer.step in SAVED_WHILE_MOVED:
            trainer.save(out / f"step_{trainer.step:06d}", out / "tokenizer")
        if trainer.step == SAVED_WHILE_MOVED[0]:
            trainer.finish_saving()
    offload.restore()
    trainer.finish_saving()


def main(out: str, settings: str) -> None:
    run, folder = small_run(**msgspec.json.decode(settings)), Path(out)
    ranks = join_ranks(run.learner)
    if ranks.is_leader:
        write_tokenizer(folder / "tokenizer")
    wait_at_barrier(ranks)
    model, reference = (trainable_model(is_tied=False) for _ in range(2))
    for each in (model, reference):
        shard_model(each, ranks, run.learner.dtype)
    trainer, offload = Trainer(model, run, ranks), StateOffload(run, ranks)
    trainer.set_reference(reference)
    trainer.start_stage("rl")
    report = OffloadReport([], [], policies=[], metrics=[], offload_metrics=[])
    train(folder, trainer, offload, report)
    trainer.check_weights()
    report.offload_metrics = list(offload.take_metrics())
    report.policies = sorted({type(each).__name__ for each in list_policies(model)})
    (folder / f"{ranks.rank}.json").write_bytes(msgspec.json.encode(report))
    parameters = gather_full_parameters(model)
    if ranks.is_leader:
        torch.save(parameters, folder / "parameters.pt")
    leave_ranks(ranks)
