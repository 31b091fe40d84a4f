"""Starts the ranks of a test program as forks of one process that has imported torch, which takes seconds.

Runs with `learner.ranks` above 1 (tests/actors/runs) start theirs through torchrun, as users do.
"""

import contextlib
import importlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = ("asterism.engine.learner.adapters.adapted_model", "tests.engine.learner.training_examples")
LIMIT_S = 240.0
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(PRELOADED))


def run_ranks(ranks: int, module: str, *arguments: object) -> None:
    """Run `main` of tests.engine.learner.MODULE on each rank, in the environment that torchrun sets, with one thread."""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_ranks(ranks, module, *arguments, errors=Path(folder)) as started,
    ):
        deadline, running = time.monotonic() + LIMIT_S, {process.sentinel: process for process in started}
        while running:
            ended = connection.wait(list(running), deadline - time.monotonic())
            assert ended, f"ranks {[process.name for process in running.values()]} run for more than {LIMIT_S:.0f} s"
            for sentinel in ended:
                rank = running.pop(sentinel)
                assert rank.exitcode == 0, (
                    f"rank {rank.name}, {rank.exitcode}: {(Path(folder) / rank.name).read_text()}"
                )


@contextlib.contextmanager
def start_ranks(ranks: int, module: str, *arguments: object, errors: Path) -> Iterator[list[BaseProcess]]:
    """Start the ranks, and kill those left at the end. Each writes its standard error to a file with its number."""
    shared = {"OMP_NUM_THREADS": "1"}
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    started: list[BaseProcess] = []
    try:
        for rank in map(str, range(ranks)):
            environment = os.environ | shared | ({"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {})
            process = _forks.Process(target=_run, args=(module, arguments, environment, errors / rank), name=rank)
            process.start()
            started.append(process)
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()
            process.close()


def _run(module: str, arguments: tuple[object, ...], environment: dict[str, str], errors: Path) -> None:
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    import torch  # not in the process of the tests that only start ranks

    torch.set_num_threads(1)
    importlib.import_module(f"tests.engine.learner.{module}").main(*arguments)
