"""Tests: a dead or late rank fails other ranks' collectives. The outage has rank, operation and duration."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asterism.bus.process.operations import OperationRecord
from asterism.engine.learner.distributed import CollectiveFailed, RankGroup, all_reduce, naming_failed_collectives
from tests.engine.learner.learner_settings import make_learner
from tests.engine.learner.rank_processes import read_result, start_ranks

CAUSES = {
    "dies": r".*Connection (closed|reset) by peer.*",
    "is_late": r"Timed out waiting 2000ms for recv operation to complete",
}


def fail_in_a_step(ranks: RankGroup, mode: str) -> str:
    """Return the error of rank 0 in a step during which rank 1 dies or is late."""
    operations = OperationRecord()
    ranks = ranks._replace(operations=operations)
    all_reduce(ranks, torch.ones(3), dist.ReduceOp.SUM)
    if ranks.rank == 1:
        if mode == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    with pytest.raises(CollectiveFailed) as failed, naming_failed_collectives(0, operations), operations.run("step 3"):
        all_reduce(ranks, torch.ones(3), dist.ReduceOp.SUM)
    return str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(CAUSES))
def test_a_dead_or_late_rank_fails_the_collectives_of_other_ranks(mode: str, tmp_path: Path) -> None:
    learner = make_learner(ranks=2, collective_timeout_s=2.0)
    with start_ranks(2, fail_in_a_step, mode, learner=learner, out=tmp_path) as (leader, _):
        leader.join(120)
        assert leader.exitcode == 0, (tmp_path / "0").read_text()
    where = r"learner rank 0, in step 3 since \d+\.\d s, in reduction since \d+\.\d s"
    assert re.fullmatch(f"{where}: {CAUSES[mode]}", read_result(tmp_path, 0))


def raise_in_a_rank(error: Exception) -> None:
    with naming_failed_collectives(1, OperationRecord()):
        raise error


def test_errors_of_nccl_and_of_the_rendezvous_count_as_failed_collectives() -> None:
    with pytest.raises(CollectiveFailed, match=r"^learner rank 1: no store$"):
        raise_in_a_rank(dist.DistStoreError("no store"))


def test_other_errors_stay_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        raise_in_a_rank(RuntimeError("shapes differ"))
