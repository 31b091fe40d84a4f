"""`python -m tests.engine.learner.failing_collectives MODE`: rank 1 dies, or is late, in a step; prints the
failure of rank 0.

The environment has the variables that torchrun sets. A late rank 1 exits when its standard input closes.
"""

import os
import signal
import sys

import torch
from torch import distributed as dist

from asterism.bus.process.operations import OperationRecord
from asterism.engine.learner.distributed import (
    CollectiveFailed,
    all_reduce,
    join_ranks,
    naming_failed_collectives,
    read_rank,
)
from tests.engine.learner.learner_settings import make_learner


def main(mode: str) -> None:
    rank, _ = read_rank()
    operations = OperationRecord()
    with naming_failed_collectives(rank, operations):
        ranks = join_ranks(make_learner(ranks=2, collective_timeout_s=2.0))._replace(operations=operations)
        all_reduce(ranks, torch.ones(3), dist.ReduceOp.SUM)
        if rank == 1:
            if mode == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.stdin.read()
            return
        with operations.run("step 3"):
            all_reduce(ranks, torch.ones(3), dist.ReduceOp.SUM)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except CollectiveFailed as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
    os._exit(0)  # like asterism.engine.learner.distributed.leave_ranks
