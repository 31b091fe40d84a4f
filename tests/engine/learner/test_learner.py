"""The learner: its rank in this process, and its process over the real bus."""

import asyncio
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from bus.bus import Bus
from bus.messages import (
    AnyMessage,
    BatchReady,
    MetricsRecorded,
    Progress,
    ProtocolError,
    Shutdown,
    StepTrained,
    WeightsPublished,
)
from bus.transport.zeromq import open_zmq_bus
from configs.atomic_write import DiskError
from configs.errors import UnusableInput
from configs.load import write_resolved
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.data.task_inputs import write_task_descriptions
from engine.learner.batch_journal import BatchJournal
from engine.learner.checkpoints import list_saved_steps, read_trainer_state
from engine.learner.distributed import RankGroup, gather_full_parameters
from engine.learner.learner_rank import CheckpointNotFound, LearnerRank
from engine.learner.saving import checkpoint_writer
from engine.model.hf_checkpoint import load_model
from engine.weight_transfer.shared_memory import load_published
from tasks import MATH_PYTHON
from tests.engine.learner.training_examples import (
    batch_messages,
    rows,
    small_run,
    store_batch,
    write_initial_checkpoint,
)

TIMEOUT_S = 60
pytestmark = [pytest.mark.slow, pytest.mark.real_clock, pytest.mark.timeout(2 * TIMEOUT_S)]


def make_run(
    path: Path, *, sft_steps: int = 3, ranks: int = 1, checkpoint_every: int = 2
) -> tuple[RunConfig, RunFolder]:
    folder = RunFolder(path / "run")
    folder.data.mkdir(parents=True)
    folder.sockets.mkdir()
    write_initial_checkpoint(folder.checkpoints / "init")
    dialogue = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<reason>One and one.</reason>\n<answer>2</answer>"},
    ]
    lines = [json.dumps({"messages": dialogue}) + "\n"] * 12
    (folder.data / "sft.jsonl").write_text("".join(lines))
    base = small_run(ranks=ranks, checkpoint_every=checkpoint_every)
    run = msgspec.structs.replace(base, sft=msgspec.structs.replace(base.sft, steps=sft_steps))
    write_resolved(run, folder.config)
    write_task_descriptions(folder, {"": MATH_PYTHON})
    return run, folder


@pytest.fixture(autouse=True)
def sweep(tmp_path: Path) -> Iterator[None]:
    """The launcher's cleanup at a run's end."""
    yield
    for path in (tmp_path / "run", tmp_path / "straight" / "run"):
        for scratch in (RunFolder(path).sockets, RunFolder(path).shared_memory):
            shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def made(tmp_path: Path) -> tuple[RunConfig, RunFolder]:
    return make_run(tmp_path)


def no_report(step: int, values: dict[str, float]) -> None:
    pass


# ---------------------------------------------------------------- one rank, without a process


def test_without_a_cold_start_step_0_is_the_initial_checkpoint(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    rank = LearnerRank(run, folder, RankGroup())
    trained = rank.start(None, no_report)
    assert trained.published is not None
    assert (trained.step, trained.published.version) == (0, 0)
    rank.finish_saving()
    initial, saved = (gather_full_parameters(load_model(folder.checkpoints / name)) for name in ("init", "step_000000"))
    torch.testing.assert_close(saved, initial, rtol=0, atol=0)
    rank.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[LearnerRank]:
    """Started at step 0."""
    rank = LearnerRank(*make_run(tmp_path, sft_steps=0), RankGroup())
    rank.start(0, no_report)
    yield rank
    rank.close()


def test_only_the_next_step_can_be_trained(rank: LearnerRank, tmp_path: Path) -> None:
    sequences = store_batch(tmp_path / "batches", 1, rows(1))
    for step in (0, 2):
        with pytest.raises(ProtocolError, match=f"step {step} cannot be trained after step 0"):
            rank.train(step, sequences)
    assert rank.train(1, sequences).step == 1


def test_a_learner_that_was_killed_after_a_checkpoint_reports_the_metrics_of_its_step_again(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, checkpoint_every=1)
    rank = LearnerRank(run, folder, RankGroup(), BatchJournal(folder.batches))
    assert rank.start(None, no_report).metrics == {}
    metrics = rank.train(1, store_batch(folder.batches, 1, rows(1))).metrics
    rank.save_if_due()
    rank.finish_saving()
    resumed = LearnerRank(run, folder, RankGroup(), BatchJournal(folder.batches)).start(None, no_report)
    assert resumed.step == 1
    assert resumed.metrics == metrics
    assert "loss" in resumed.metrics
    rank.close()


def test_the_kl_term_is_relative_to_the_weights_before_rl_also_after_resuming(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    run = replace(run, learner=replace(run.learner, kl_coef=0.1, minibatches=1, checkpoint_every=1))
    figures = list[float]()
    for resumed in (False, True):
        rank = LearnerRank(run, folder, RankGroup())
        rank.start(None, no_report)
        step = 2 if resumed else 1
        sequences = store_batch(folder.batches, step, rows(step))
        figures.append(rank.train(step, sequences).metrics["kl_reference"])
        rank.save_if_due()
        rank.close()
    assert figures[0] == pytest.approx(0.0, abs=1e-9)  # before the first update
    assert figures[1] > 1e-6


def test_weights_that_are_not_finite_are_reported_before_the_first_step(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    checkpoint = folder.checkpoints / "init" / "model.safetensors"
    weights = load_file(checkpoint)
    weights["model.norm.weight"][2] = float("nan")
    save_file(weights, checkpoint, {"format": "pt"})
    rank = LearnerRank(run, folder, RankGroup())
    with pytest.raises(
        UnusableInput, match=r"not finite after step 0, first in model\.norm\.weight.* model\.checkpoint"
    ):
        rank.start(None, no_report)
    rank.close()


def test_max_staleness_plus_one_versions_stay_readable(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    ahead = msgspec.structs.replace(run, rl=msgspec.structs.replace(run.rl, max_staleness=2, prompts=8))
    rank = LearnerRank(ahead, folder, RankGroup())
    published = [rank.start(0, no_report).published, *(rank.train(step, []).published for step in (1, 2))]
    model = load_model(folder.checkpoints / "init")
    for each in published:
        assert each is not None
        load_published(each, dict(model.named_parameters()), torch.float32)
    rank.close()


def test_resuming_from_a_step_without_a_checkpoint_is_refused(made: tuple[RunConfig, RunFolder]) -> None:
    with pytest.raises(CheckpointNotFound, match="step_000007: no checkpoint to resume from"):
        LearnerRank(*made, RankGroup()).start(7, no_report)


def test_a_killed_cold_start_resumes_from_its_partial_checkpoint(
    made: tuple[RunConfig, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = made
    monkeypatch.setattr("engine.learner.saving.checkpoint_schedule.SFT_SAVE_EVERY", 2)

    class Killed(Exception):
        pass

    def kill_at_three(step: int, values: dict[str, float]) -> None:
        if step == 3:
            raise Killed

    killed = LearnerRank(run, folder, RankGroup())
    with pytest.raises(Killed):
        killed.start(None, kill_at_three)
    killed.close()
    assert not (folder.partial_cold_start / "model.safetensors").exists()
    seen: list[int] = []
    resumed = LearnerRank(run, folder, RankGroup())
    resumed.start(None, lambda step, values: seen.append(step))
    resumed.close()
    straight = LearnerRank(*make_run(tmp_path / "straight"), RankGroup())
    straight.start(None, no_report)
    straight.close()
    straight_folder = RunFolder(tmp_path / "straight" / "run")
    assert seen == [3]
    torch.testing.assert_close(saved_weights(folder, 0), saved_weights(straight_folder, 0), rtol=0, atol=0)
    assert not (folder.checkpoints / "sft_partial").exists()


def test_old_checkpoints_are_deleted_except_step_0_and_the_last(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, checkpoint_every=2)
    rank = LearnerRank(run, folder, RankGroup())
    rank.start(None, no_report)
    for step in range(1, 7):
        rank.train(step, [])
        rank.save_if_due()
    assert list_saved_steps(folder.checkpoints) == [0, 4, 6]  # the last step waits for its checkpoint
    rank.close()


def test_checkpoints_without_an_export_are_saved_between_those_with_one(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, checkpoint_every=2)
    run = replace(run, learner=replace(run.learner, keep_checkpoints=9, export_every=3))
    rank = LearnerRank(run, folder, RankGroup())
    rank.start(None, no_report)
    for step in range(1, 7):
        rank.train(step, [])
        rank.save_if_due()
    rank.close()
    exported = [folder.get_checkpoint_path(step) / "model.safetensors" for step in (0, 2, 3, 4, 6)]
    assert list_saved_steps(folder.checkpoints) == [0, 2, 3, 4, 6]
    assert [path.exists() for path in exported] == [True, False, True, False, True]


def test_batches_are_deleted_only_after_their_checkpoint_has_its_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, checkpoint_every=1)
    journal, seen = BatchJournal(folder.batches), list[list[int]]()

    def record_saved(_step: int) -> None:
        seen.append(list_saved_steps(folder.checkpoints))

    monkeypatch.setattr(journal, "delete_up_to", record_saved)
    rank = LearnerRank(run, folder, RankGroup(), journal)
    rank.start(None, no_report)
    for step in (1, 2):
        rank.train(step, [])
        rank.save_if_due()
    rank.close()
    assert [saved[-1] for saved in seen] == [1, 2]


def test_a_failed_write_ends_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, checkpoint_every=1)
    rank = LearnerRank(run, folder, RankGroup())
    rank.start(None, no_report)
    rank.finish_saving()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_shard", fail)
    rank.train(1, [])
    rank.save_if_due()
    with pytest.raises(DiskError, match=r"/\.step_000001\.building: No space left on device"):
        rank.train(2, [])
        rank.save_if_due()
    rank.close()
    assert list_saved_steps(folder.checkpoints) == [0]


def test_weights_are_published_before_they_are_saved_except_in_the_last_step(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, checkpoint_every=1)
    rank = LearnerRank(run, folder, RankGroup())
    rank.start(None, no_report)
    last = run.rl.steps
    for step in range(1, last):
        trained = rank.train(step, [])
        assert trained.published is not None
        rank.finish_saving()
        assert list_saved_steps(folder.checkpoints)[-1] == step - 1
        rank.save_if_due()
        rank.finish_saving()
        assert list_saved_steps(folder.checkpoints)[-1] == step
    rank.train(last, [])
    assert list_saved_steps(folder.checkpoints)[-1] == last
    rank.close()


def saved_weights(folder: RunFolder, step: int) -> dict[str, Tensor]:
    return gather_full_parameters(load_model(folder.get_checkpoint_path(step)))


# ---------------------------------------------------------------- the process


class Peers:
    """The head and the launcher, as the learner sees them."""

    def __init__(self, folder: RunFolder, process: asyncio.subprocess.Process) -> None:
        self._buses = {name: open_zmq_bus(name, folder.sockets, 100) for name in ("head", "launcher")}
        self.process = process
        self.pid = process.pid
        self.metrics: list[MetricsRecorded] = []  # received by `receive`, which does not return them

    @property
    def head(self) -> Bus:
        return self._buses["head"]

    async def receive(self, name: str = "head") -> AnyMessage:
        """The next message; fails with the learner's output if the learner ends."""
        receive = asyncio.ensure_future(self._buses[name].receive())
        ended = asyncio.ensure_future(self.process.wait())
        await asyncio.wait((receive, ended), timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not receive.done():
            receive.cancel()
            pytest.fail(f"{name} receives nothing; {self.process}: {await self.read_output() if ended.done() else ''}")
        assert receive.result().sender == "learner"
        message = receive.result().message
        if isinstance(message, MetricsRecorded):
            self.metrics.append(message)
            return await self.receive(name)
        return message

    async def send_batch(self, step: int) -> None:
        for message in batch_messages(step, rows(step)):
            await self.head.send("learner", message)

    async def read_output(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def receive_step(self) -> tuple[StepTrained, WeightsPublished]:
        trained, published = await self.receive(), await self.receive()
        assert isinstance(trained, StepTrained)
        assert isinstance(published, WeightsPublished)
        assert trained.step == published.version
        return trained, published

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), TIMEOUT_S)

    async def close(self) -> None:
        for bus in self._buses.values():
            await bus.close()


@asynccontextmanager
async def learner(folder: RunFolder, *arguments: str, ranks: int = 1) -> AsyncIterator[Peers]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    argv = [sys.executable, *launcher, "-m", "engine.learner", "--run-folder", str(folder.path), *arguments]
    process = await asyncio.create_subprocess_exec(*argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=-1)
    peers = Peers(folder, process)
    try:
        yield peers
    finally:
        await peers.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def wait_for_checkpoint(folder: RunFolder, step: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while step not in list_saved_steps(folder.checkpoints):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)


def without_times(trained: StepTrained) -> dict[str, float]:
    return {name: value for name, value in trained.metrics.items() if not name.endswith("_s")}


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_run_from_cold_start_to_shutdown(tmp_path: Path, ranks: int) -> None:
    _, folder = make_run(tmp_path, ranks=ranks)
    async with learner(folder, "--resume-step", "0", ranks=ranks) as peers:
        first, published = await peers.receive_step()
        assert (first.step, first.metrics["sft_steps"]) == (0, 3.0)
        shown = await peers.receive("launcher")
        assert isinstance(shown, Progress)
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

        await peers.head.send("learner", BatchReady(3, ()))
        trained, _ = await peers.receive_step()
        assert (trained.step, trained.metrics["updates"]) == (3, 0.0)
        torch.testing.assert_close(gather_full_parameters(model), saved_weights(folder, 2), rtol=0, atol=0)
        await peers.head.send("learner", Shutdown())
        assert await peers.exit_code() == 0, await peers.read_output()
    assert list_saved_steps(folder.checkpoints) == [0, 2]
    assert read_trainer_state(folder.get_checkpoint_path(2)).ranks == ranks
    assert list(folder.shared_memory.iterdir()) == []


async def test_a_killed_learner_resumes_from_its_newest_checkpoint_with_the_same_result(
    made: tuple[RunConfig, RunFolder], tmp_path: Path
) -> None:
    _, folder = made
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
        peers.process.send_signal(signal.SIGKILL)
        assert await peers.exit_code() == -signal.SIGKILL
    async with learner(folder) as peers:
        again = await peers.receive()  # later batches are in its journal
        assert isinstance(again, StepTrained)
        assert again.step == 2
        trained, _ = await peers.receive_step()
        assert trained.step == 3
        metrics["resumed"] = without_times(trained)
    assert metrics["resumed"] == metrics["straight"]


async def test_sigterm_abandons_the_current_step(tmp_path: Path) -> None:
    _, folder = make_run(tmp_path, sft_steps=100_000)
    async with learner(folder) as peers:
        await peers.receive("launcher")  # the cold start is running, and takes minutes
        peers.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(peers.process.wait(), 10) == 0
    assert list_saved_steps(folder.checkpoints) == []


async def test_unusable_input_is_reported_in_one_line(made: tuple[RunConfig, RunFolder]) -> None:
    _, folder = made
    (folder.data / "sft.jsonl").write_text("{}\n")
    async with learner(folder) as peers:
        assert await peers.exit_code() == 2
        last_line = (await peers.read_output()).splitlines()[-1]
        assert "sft.jsonl" in last_line
        assert "messages" in last_line
