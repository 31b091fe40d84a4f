"""Runs functions and learners on ranks. All ranks are forks of one process, because the import of torch takes seconds.

Complete runs with several ranks (tests/actors/runs) use torchrun instead, as users do.
"""

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from asterism.configs.schema.learner_config import LearnerConfig
from asterism.engine.learner.distributed import join_ranks, leave_ranks
from asterism.engine.learner.learner import main

PRELOADED = (
    *("pytest", "hypothesis", "asterism.engine.learner.learner", "tests.engine.learner.train_ranks"),
    "torch._dynamo",  # otherwise the first sharded parameter imports it, in each rank
)
LIMIT_S = 240.0
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(PRELOADED))
Result = TypeVar("Result")


def run_ranks(
    count: int, program: Callable[..., Result], *arguments: object, learner: LearnerConfig | None = None
) -> list[Result]:
    """Run a function on each rank with its RankGroup and these arguments. Return the results in the order of ranks.

    Each rank has one thread and the environment that torchrun sets. The ranks join with the settings `learner`.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        start_ranks(count, program, *arguments, learner=learner, out=Path(folder)) as started,
    ):
        deadline, running = time.monotonic() + LIMIT_S, {process.sentinel: process for process in started}
        while running:
            ended = connection.wait(list(running), deadline - time.monotonic())
            assert ended, f"ranks {[process.name for process in running.values()]} run for more than {LIMIT_S:.0f} s"
            for sentinel in ended:
                rank = running.pop(sentinel)
                assert rank.exitcode == 0, f"rank {rank.name}, {rank.exitcode}: {Path(folder, rank.name).read_text()}"
        return [read_result(Path(folder), rank) for rank in range(count)]


def start_ranks(
    count: int, program: Callable[..., object], *arguments: object, learner: LearnerConfig | None = None, out: Path
) -> AbstractContextManager[list[BaseProcess]]:
    """Start the function on the ranks, which join with the settings `learner`."""
    return _start_forks(count, _run, program, arguments, learner or LearnerConfig(), out, out=out)


def start_learner(count: int, *arguments: str, out: Path) -> AbstractContextManager[list[BaseProcess]]:
    """Start the ranks of a learner with these arguments of its command line."""
    return _start_forks(count, _run_learner, arguments, out=out)


@contextlib.contextmanager
def _start_forks(count: int, target: Callable[..., None], *arguments: object, out: Path) -> Iterator[list[BaseProcess]]:
    """Start the ranks, and kill the remaining ones at the end. A file in `out` for each rank has its standard error."""
    shared = {"OMP_NUM_THREADS": "1"}
    if count > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    started: list[BaseProcess] = []
    try:
        for rank in map(str, range(count)):
            environment = os.environ | shared | ({"RANK": rank, "LOCAL_RANK": rank} if count > 1 else {})
            process = _forks.Process(target=_run_fork, args=(environment, out / rank, target, arguments), name=rank)
            process.start()
            started.append(process)
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()
            process.close()


def read_result(out: Path, rank: int) -> Any:
    """Read the function's result on this rank."""
    return pickle.loads((out / f"{rank}.result").read_bytes())


def _run_fork(
    environment: dict[str, str], errors: Path, target: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    target(*arguments)


def _run(program: Callable[..., object], arguments: tuple[object, ...], learner: LearnerConfig, out: Path) -> None:
    ranks = join_ranks(learner)
    (out / f"{ranks.rank}.result").write_bytes(pickle.dumps(program(ranks, *arguments)))
    leave_ranks(ranks)
    os._exit(0)  # ends the process like leave_ranks, even if the program has created a group


def _run_learner(arguments: Sequence[str]) -> None:
    sys.argv[1:] = arguments
    sys.exit(main())
