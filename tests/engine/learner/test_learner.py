"""Tests of the learner as a process with the real bus. The process is a fork (rank_processes.py)."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from asterism.bus import messages as msg
from asterism.bus.bus import Bus
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps, read_trainer_state
from asterism.engine.learner.distributed import gather_full_parameters
from asterism.engine.model.hf_checkpoint import load_model
from asterism.engine.weight_transfer.shared_memory import load_published
from tests.engine.learner.learner_runs import make_run, saved_weights
from tests.engine.learner.rank_processes import start_learner
from tests.engine.learner.training_examples import batch_messages, rows

TIMEOUT_S = 60
pytestmark = [
    *(pytest.mark.slow, pytest.mark.real_clock, pytest.mark.timeout(2 * TIMEOUT_S)),
    pytest.mark.usefixtures("sweep"),
]


class Peers:
    """The peers of the learner: head and launcher."""

    def __init__(self, folder: RunFolder, ranks: list[BaseProcess]) -> None:
        self._buses = {name: open_zmq_bus(name, folder.sockets, 100) for name in ("head", "launcher")}
        self._folder, self._ranks = folder, ranks
        self.leader = ranks[0]
        self.metrics: list[msg.MetricsRecorded] = []  # messages that `receive` stores instead of returning them

    @property
    def head(self) -> Bus:
        return self._buses["head"]

    async def receive(self, name: str = "head") -> msg.AnyMessage:
        """Return the next message. Fails with the learner's output if the learner exits."""
        receive = asyncio.ensure_future(self._buses[name].receive())
        ended = asyncio.ensure_future(self.exit_code())
        await asyncio.wait((receive, ended), timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not receive.done():
            receive.cancel()
            pytest.fail(f"{name} receives nothing; {self.leader}: {self.read_output()}")
        assert receive.result().sender == "learner"
        message = receive.result().message
        if isinstance(message, msg.MetricsRecorded):
            self.metrics.append(message)
            return await self.receive(name)
        return message

    async def send_batch(self, step: int) -> None:
        for message in batch_messages(step, rows(step)):
            await self.head.send("learner", message)

    def read_output(self) -> str:
        return (self._folder.path / "0").read_text()

    async def receive_step(self) -> tuple[msg.StepTrained, msg.WeightsPublished]:
        trained, published = await self.receive(), await self.receive()
        assert isinstance(trained, msg.StepTrained)
        assert isinstance(published, msg.WeightsPublished)
        assert trained.step == published.version
        return trained, published

    async def exit_code(self) -> int | None:
        """Wait until all ranks have exited, and return their exit code."""
        async with asyncio.timeout(TIMEOUT_S):
            while any(rank.exitcode is None for rank in self._ranks):  # noqa: ASYNC110 - they are other processes
                await asyncio.sleep(0.01)
        (code,) = {rank.exitcode for rank in self._ranks}
        return code

    async def close(self) -> None:
        for bus in self._buses.values():
            await bus.close()


@asynccontextmanager
async def learner(folder: RunFolder, *arguments: str, ranks: int = 1) -> AsyncIterator[Peers]:
    with start_learner(ranks, "--run-folder", str(folder.path), *arguments, out=folder.path) as started:
        peers = Peers(folder, started)
        try:
            yield peers
        finally:
            await peers.close()


async def wait_for_checkpoint(folder: RunFolder, step: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while step not in list_saved_steps(folder.checkpoints):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)


def without_times(trained: msg.StepTrained) -> dict[str, float]:
    """Return the metrics that measure neither times nor memory."""
    return {name: each for name, each in trained.metrics.items() if not name.endswith(("_s", "_gib"))}


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_requested_checkpoint_contains_the_last_trained_step(tmp_path: Path, ranks: int) -> None:
    _, folder = make_run(tmp_path, ranks=ranks)
    async with learner(folder, "--resume-step", "0", ranks=ranks) as peers:
        await peers.receive_step()
        await peers.send_batch(1)
        await peers.receive_step()
        await peers.head.send("learner", msg.CheckpointRequested())
        saved = await peers.receive("launcher")
        while isinstance(saved, msg.Progress):
            saved = await peers.receive("launcher")
        assert saved == msg.CheckpointSaved(1)
        assert list_saved_steps(folder.checkpoints)[-1] == 1
        await peers.send_batch(2)  # the learner does not train on this batch
        await peers.head.send("learner", msg.Shutdown())
        assert await peers.exit_code() == 0
    assert list_saved_steps(folder.checkpoints)[-1] == 1


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_run_from_cold_start_to_shutdown(tmp_path: Path, ranks: int) -> None:
    _, folder = make_run(tmp_path, ranks=ranks)
    async with learner(folder, "--resume-step", "0", ranks=ranks) as peers:
        first, published = await peers.receive_step()
        assert (first.step, first.metrics["sft_steps"]) == (0, 3.0)
        shown = await peers.receive("launcher")
        assert isinstance(shown, msg.Progress)
        assert (shown.stage, shown.steps) == ("sft", 3)
        assert {"loss", "tokens_per_s"} <= shown.values.keys()
        assert [(each.kind, each.step) for each in peers.metrics] == [("sft", 1), ("sft", 2), ("sft", 3)]
        assert {"loss", "lr", "grad_norm", "tokens_per_s"} <= peers.metrics[0].values.keys()
        model = load_model(folder.checkpoints / "init")
        await wait_for_checkpoint(folder, 0)
        before = saved_weights(folder, 0)
        load_published(published, dict(model.named_parameters()), torch.float32)
        torch.testing.assert_close(gather_full_parameters(model), before, rtol=0, atol=0)

        for step in (1, 2):
            await peers.send_batch(step)
            trained, published = await peers.receive_step()
            assert trained.step == step
            assert {"loss", "clip_fraction", "train_s", "publish_s", "checkpoint_s"} <= trained.metrics.keys()
        load_published(published, dict(model.named_parameters()), torch.float32)
        await wait_for_checkpoint(folder, 2)
        torch.testing.assert_close(gather_full_parameters(model), saved_weights(folder, 2), rtol=0, atol=0)
        assert any(not torch.equal(before[name], after) for name, after in gather_full_parameters(model).items())

        await peers.head.send("learner", msg.BatchReady(3, ()))
        trained, _ = await peers.receive_step()
        assert (trained.step, trained.metrics["updates"]) == (3, 0.0)
        torch.testing.assert_close(gather_full_parameters(model), saved_weights(folder, 2), rtol=0, atol=0)
        await peers.head.send("learner", msg.Shutdown())
        assert await peers.exit_code() == 0, peers.read_output()
    assert list_saved_steps(folder.checkpoints) == [0, 2]
    assert read_trainer_state(folder.get_checkpoint_path(2)).ranks == ranks
    assert list(folder.shared_memory.iterdir()) == []


async def test_a_killed_learner_resumes_from_its_newest_checkpoint_with_the_same_result(tmp_path: Path) -> None:
    _, folder = make_run(tmp_path)
    metrics: dict[str, dict[str, float]] = {}

    async def train(peers: Peers, *steps: int) -> dict[str, float]:
        trained = None
        for step in steps:
            await peers.send_batch(step)
            trained, _ = await peers.receive_step()
        assert trained is not None
        return without_times(trained)

    async with learner(folder) as peers:
        await peers.receive_step()
        metrics["straight"] = await train(peers, 1, 2, 3)
        await wait_for_checkpoint(folder, 2)
        peers.leader.kill()
        assert await peers.exit_code() == -signal.SIGKILL
    async with learner(folder) as peers:
        again = await peers.receive()  # the journal contains the later batches
        assert isinstance(again, msg.StepTrained)
        assert again.step == 2
        trained, _ = await peers.receive_step()
        assert trained.step == 3
        metrics["resumed"] = without_times(trained)
    assert metrics["resumed"] == metrics["straight"]


async def test_sigterm_abandons_the_current_step(tmp_path: Path) -> None:
    _, folder = make_run(tmp_path, sft_steps=100_000)
    async with learner(folder) as peers:
        await peers.receive("launcher")  # the cold start runs and would take minutes
        peers.leader.terminate()
        assert await peers.exit_code() == 0
    assert list_saved_steps(folder.checkpoints) == []


async def test_the_report_of_unusable_input_has_one_line(tmp_path: Path) -> None:
    _, folder = make_run(tmp_path)
    (folder.data / "sft.jsonl").write_text("{}\n")
    async with learner(folder) as peers:
        assert await peers.exit_code() == 2
        last_line = peers.read_output().splitlines()[-1]
        assert "sft.jsonl" in last_line
        assert "messages" in last_line
