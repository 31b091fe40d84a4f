"""`main(CHECKPOINT, OUT, LEARNER)`: reports what each rank loads and keeps.

Each rank writes OUT/RANK.json, a RankReport. LEARNER is a JSON object with settings of [learner].
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asterism.engine.learner.batches.minibatches import build_micro_batch
from asterism.engine.learner.distributed import RankGroup, gather_full_parameters, join_ranks, leave_ranks
from asterism.engine.learner.sharding import load_sharded_model, reshard_parameters
from asterism.engine.model.causal_lm import CausalLM
from asterism.policies.losses.token_scores import ScoredTokens
from tests.engine.learner.training_examples import sequences, small_run


class ParameterForm(msgspec.Struct, frozen=True):
    is_sharded: bool
    dtype: str
    local_share: float  # share of the elements that this rank has


class RankReport(msgspec.Struct):
    loading_bytes: int  # peak growth of anonymous memory while the model loads
    sums: dict[str, float]  # sum of the elements of each whole parameter
    loaded: dict[str, ParameterForm]
    after_forward: dict[str, ParameterForm]
    logprobs: list[float]
    mesh: dict[str, int]  # sizes of the mesh by name
    backends: list[str]  # backends of the control group and of the tensor group
    timeouts_s: list[float]


def describe_parameters(model: torch.nn.Module) -> dict[str, ParameterForm]:
    return {name: _describe(parameter) for name, parameter in model.named_parameters()}


def _describe(parameter: Tensor) -> ParameterForm:
    if isinstance(parameter, DTensor):
        return ParameterForm(True, str(parameter.dtype), parameter.to_local().numel() / parameter.numel())
    return ParameterForm(False, str(parameter.dtype), 1.0)


class MemoryPeak:
    """The peak growth of this process's anonymous memory since construction, in bytes."""

    def __init__(self) -> None:
        self._start = self._largest = read_anonymous_bytes()

    def update(self) -> None:
        self._largest = max(self._largest, read_anonymous_bytes())

    @property
    def growth(self) -> int:
        return self._largest - self._start


def read_anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return 1024 * int(kib)


@contextmanager
def measuring_memory() -> Generator[MemoryPeak]:
    """Measure the peak by samples in another thread every millisecond."""
    peak, stop = MemoryPeak(), threading.Event()

    def sample() -> None:
        while not stop.wait(0.001):
            peak.update()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.update()


def score(model: CausalLM) -> list[float]:
    """Compute log probabilities of a few tokens, without a backward pass."""
    batch = build_micro_batch(sequences(0, count=2), [1.0, 1.0])
    with torch.no_grad():
        scores = model(
            batch.token_ids_T[None],
            tokens=ScoredTokens(batch.positions_N, batch.targets_N),
            segments=batch.segments,
        )
    reshard_parameters(model)
    return scores.logprobs_N.tolist()


def get_groups(ranks: RankGroup) -> list[Any]:
    return [dist.group.WORLD, ranks.tensor_group]


def main(checkpoint: str, out: str, settings: str) -> None:
    learner = small_run(**msgspec.json.decode(settings)).learner
    ranks = join_ranks(learner)
    with measuring_memory() as peak:
        model = load_sharded_model(Path(checkpoint), ranks, learner.dtype)
    groups = get_groups(ranks)
    report = RankReport(
        loading_bytes=peak.growth,
        sums={name: float(each.double().sum()) for name, each in gather_full_parameters(model).items()},
        loaded=describe_parameters(model),
        logprobs=score(model),
        after_forward=describe_parameters(model),
        mesh={} if ranks.mesh is None else dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True)),
        backends=[dist.get_backend(group) for group in groups],
        timeouts_s=[group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups],
    )
    (Path(out) / f"{ranks.rank}.json").write_bytes(msgspec.json.encode(report))
    leave_ranks(ranks)
