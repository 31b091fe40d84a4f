"""The learner as a process of its own, spoken to over the real bus."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from bus.messages import AnyMessage, BatchReady, Progress, ProtocolError, Shutdown, StepTrained, WeightsPublished
from bus.transport import Bus
from bus.zeromq import zmq_bus
from configs.load import write_resolved
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.checkpoint import load_model
from engine.distributed import Ranks, whole_parameters
from engine.learner_rank import LearnerRank, NoSuchStep
from engine.snapshots import read_state, steps_saved
from engine.weights import load_published
from tests.engine.training_examples import rows, small_run, write_initial_checkpoint

pytestmark = pytest.mark.slow
TIMEOUT_S = 60


def make_run(path: Path, *, sft_steps: int = 3, ranks: int = 1, checkpoint_every: int = 2) -> tuple[Run, RunFolder]:
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
    return run, folder


@pytest.fixture(autouse=True)
def sweep(tmp_path: Path) -> Iterator[None]:
    """What the launcher does at a run's end."""
    yield
    for path in (tmp_path / "run", tmp_path / "straight" / "run"):
        for scratch in (RunFolder(path).sockets, RunFolder(path).shared_memory):
            shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Run, RunFolder]:
    return make_run(tmp_path)


def no_report(step: int, values: dict[str, float]) -> None:
    pass


# ---------------------------------------------------------------- one rank, without a process


def test_without_a_cold_start_step_zero_is_the_given_checkpoint(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    rank = LearnerRank(run, folder, Ranks())
    trained = rank.start(None, no_report)
    assert trained.published is not None
    assert (trained.step, trained.published.version) == (0, 0)
    initial, saved = (whole_parameters(load_model(folder.checkpoints / name)) for name in ("init", "step_000000"))
    torch.testing.assert_close(saved, initial, rtol=0, atol=0)
    rank.close()


def test_only_the_next_step_can_be_trained(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    rank = LearnerRank(run, folder, Ranks())
    rank.start(0, no_report)
    for step in (0, 2):
        with pytest.raises(ProtocolError, match=f"step {step} cannot be trained after step 0"):
            rank.train(step, rows(0))
    assert rank.train(1, rows(0)).step == 1
    rank.close()


def test_rows_of_another_version_than_the_step_updates_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    rank = LearnerRank(run, folder, Ranks())
    rank.start(0, no_report)
    with pytest.raises(ProtocolError, match="tokens of version 1 to train on: step 1 takes version 0"):
        rank.train(1, rows(2))
    assert rank.train(1, rows(1)).step == 1
    rank.close()


def test_as_many_versions_stay_readable_as_rollouts_may_run_ahead(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    ahead = msgspec.structs.replace(run, rl=msgspec.structs.replace(run.rl, max_staleness=2, prompts=8))
    rank = LearnerRank(ahead, folder, Ranks())
    published = [rank.start(0, no_report).published, *(rank.train(step, []).published for step in (1, 2))]
    model = load_model(folder.checkpoints / "init")
    for each in published:
        assert each is not None
        load_published(each, dict(model.named_parameters()))
    rank.close()


def test_a_step_that_was_not_saved_cannot_be_gone_on_from(made: tuple[Run, RunFolder]) -> None:
    with pytest.raises(NoSuchStep, match="step_000007: there is no checkpoint"):
        LearnerRank(*made, Ranks()).start(7, no_report)


def test_a_cold_start_that_was_killed_goes_on_where_it_was_saved(
    made: tuple[Run, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = made
    monkeypatch.setattr("engine.learner_rank.SFT_SAVE_EVERY", 2)

    class Killed(Exception):
        pass

    def kill_at_three(step: int, values: dict[str, float]) -> None:
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        LearnerRank(run, folder, Ranks()).start(None, kill_at_three)
    seen: list[int] = []
    resumed = LearnerRank(run, folder, Ranks())
    resumed.start(None, lambda step, values: seen.append(step))
    straight_run, straight_folder = make_run(tmp_path / "straight")
    LearnerRank(straight_run, straight_folder, Ranks()).start(None, no_report)
    assert seen == [3]
    torch.testing.assert_close(saved_weights(folder, 0), saved_weights(straight_folder, 0), rtol=0, atol=0)
    assert not (folder.checkpoints / "sft_partial").exists()


def test_old_checkpoints_go_but_the_cold_start_and_the_last_step_stay(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, checkpoint_every=2)
    rank = LearnerRank(run, folder, Ranks())
    rank.start(None, no_report)
    for step in range(1, 7):
        rank.train(step, [])
    assert steps_saved(folder.checkpoints) == [0, 4, 6]
    rank.close()


def saved_weights(folder: RunFolder, step: int) -> dict[str, Tensor]:
    return whole_parameters(load_model(folder.checkpoint(step)))


# ---------------------------------------------------------------- the process


class Peers:
    """The head and the launcher, as the learner sees them."""

    def __init__(self, folder: RunFolder, process: asyncio.subprocess.Process) -> None:
        self._buses = {name: zmq_bus(name, folder.sockets, 100) for name in ("head", "launcher")}
        self.process = process
        self.pid = process.pid

    @property
    def head(self) -> Bus:
        return self._buses["head"]

    async def heard(self, name: str = "head") -> AnyMessage:
        """The next message, or a failure with what the learner printed if it ends instead."""
        heard = asyncio.ensure_future(self._buses[name].receive())
        ended = asyncio.ensure_future(self.process.wait())
        await asyncio.wait((heard, ended), timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not heard.done():
            heard.cancel()
            pytest.fail(f"{name} heard nothing; {self.process}: {await self.printed() if ended.done() else ''}")
        assert heard.result().sender == "learner"
        return heard.result().message

    async def printed(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def heard_step(self) -> tuple[StepTrained, WeightsPublished]:
        trained, published = await self.heard(), await self.heard()
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


def without_times(trained: StepTrained) -> dict[str, float]:
    return {name: value for name, value in trained.metrics.items() if not name.endswith("_s")}


def run_async(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S):
            await scenario()

    asyncio.run(bounded())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_from_cold_start_to_shutdown(tmp_path: Path, ranks: int) -> None:
    _, folder = make_run(tmp_path, ranks=ranks)

    async def scenario() -> None:
        async with learner(folder, "--resume-step", "0", ranks=ranks) as peers:
            first, published = await peers.heard_step()
            assert (first.step, first.metrics["sft_steps"]) == (0, 3.0)
            shown = await peers.heard("launcher")
            assert isinstance(shown, Progress)
            assert (shown.stage, shown.steps) == ("sft", 3)
            assert {"loss", "tokens_per_s"} <= shown.values.keys()
            model = load_model(folder.checkpoints / "init")
            before = whole_parameters(load_model(folder.checkpoint(0)))
            load_published(published, dict(model.named_parameters()))
            torch.testing.assert_close(whole_parameters(model), before, rtol=0, atol=0)

            for step in (1, 2):
                await peers.head.send("learner", BatchReady(step, tuple(rows(step))))
                trained, published = await peers.heard_step()
                assert trained.step == step
                assert {"loss", "clip_fraction", "train_s", "publish_s", "checkpoint_s"} <= trained.metrics.keys()
            load_published(published, dict(model.named_parameters()))
            torch.testing.assert_close(whole_parameters(model), saved_weights(folder, 2), rtol=0, atol=0)
            assert any(not torch.equal(before[name], after) for name, after in whole_parameters(model).items())

            await peers.head.send("learner", BatchReady(3, ()))
            trained, _ = await peers.heard_step()
            assert (trained.step, trained.metrics["updates"]) == (3, 0.0)
            await peers.head.send("learner", Shutdown())
            assert await peers.exit_code() == 0, await peers.printed()

    run_async(scenario)
    assert steps_saved(folder.checkpoints) == [0, 2]
    assert read_state(folder.checkpoint(2)).ranks == ranks
    assert list(folder.shared_memory.iterdir()) == []


def test_a_killed_learner_goes_on_from_its_newest_checkpoint_as_if_nothing_had_been(
    made: tuple[Run, RunFolder], tmp_path: Path
) -> None:
    _, folder = made
    metrics: dict[str, dict[str, float]] = {}

    async def train(peers: Peers, *steps: int) -> dict[str, float]:
        trained = None
        for step in steps:
            await peers.head.send("learner", BatchReady(step, tuple(rows(step))))
            trained, _ = await peers.heard_step()
        assert trained is not None
        return without_times(trained)

    async def scenario() -> None:
        async with learner(folder) as peers:
            await peers.heard_step()
            metrics["straight"] = await train(peers, 1, 2, 3)
            peers.process.send_signal(signal.SIGKILL)
            assert await peers.exit_code() == -signal.SIGKILL
        async with learner(folder) as peers:
            again = await peers.heard()  # what it was given since, nobody has to give it again
            assert isinstance(again, StepTrained)
            assert again.step == 2
            trained, _ = await peers.heard_step()
            assert trained.step == 3
            metrics["resumed"] = without_times(trained)

    run_async(scenario)
    assert metrics["resumed"] == metrics["straight"]


def test_a_step_that_is_under_way_at_sigterm_is_abandoned(tmp_path: Path) -> None:
    _, folder = make_run(tmp_path, sft_steps=100_000)

    async def scenario() -> None:
        async with learner(folder) as peers:
            await peers.heard("launcher")  # the cold start is under way, and takes minutes
            peers.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(peers.process.wait(), 10) == 0

    run_async(scenario)
    assert steps_saved(folder.checkpoints) == []


def test_input_that_cannot_be_used_is_named_in_one_line(made: tuple[Run, RunFolder]) -> None:
    _, folder = made
    (folder.data / "sft.jsonl").write_text("{}\n")

    async def scenario() -> None:
        async with learner(folder) as peers:
            assert await peers.exit_code() == 2
            last_line = (await peers.printed()).splitlines()[-1]
            assert "sft.jsonl" in last_line
            assert "messages" in last_line

    run_async(scenario)
