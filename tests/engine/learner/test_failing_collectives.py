"""Tests: a dead or late rank fails the collective of another rank: an outage with rank, operation and duration."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from asterism.bus.process.operations import OperationRecord
from asterism.engine.learner.distributed import CollectiveFailed, naming_failed_collectives

CAUSES = {
    "dies": r".*Connection (closed|reset) by peer.*",
    "is_late": r"Timed out waiting 2000ms for recv operation to complete",
}


@contextmanager
def started_ranks(mode: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start two ranks of failing_collectives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.engine.learner.failing_collectives", mode]
    ranks = [
        subprocess.Popen(
            command, env={**shared, "RANK": rank}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(CAUSES))
def test_a_dead_or_late_rank_fails_the_collective_of_other_ranks(mode: str) -> None:
    with started_ranks(mode) as (leader, _):
        printed, _ = leader.communicate(timeout=120)
    where = r"learner rank 0, in step 3 since \d+\.\d s, in reduction since \d+\.\d s"
    assert re.fullmatch(f"{where}: {CAUSES[mode]}\n", printed), printed


def raise_in_a_rank(error: Exception) -> None:
    with naming_failed_collectives(1, OperationRecord()):
        raise error


def test_errors_of_nccl_and_of_the_rendezvous_are_failed_collectives() -> None:
    with pytest.raises(CollectiveFailed, match=r"^learner rank 1: no store$"):
        raise_in_a_rank(dist.DistStoreError("no store"))


def test_other_errors_are_not_changed() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        raise_in_a_rank(RuntimeError("shapes differ"))
