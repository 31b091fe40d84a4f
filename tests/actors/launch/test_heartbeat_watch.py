"""A watch decides when a child process with learner ranks hangs, and reports the cause. The clock is virtual."""

import asyncio
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from asterism.actors.launch.heartbeat_watch import Hang, HeartbeatWatch
from asterism.bus.process.heartbeat import Heartbeat
from asterism.bus.process.operations import RunningOperation, operations_path
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SupervisionConfig
from tests.simulation.clock import VirtualLoop
from tests.simulation.processes import SimulatedProcess

SETTINGS = SupervisionConfig(heartbeat_s=1.0, heartbeat_timeout_s=10.0, first_heartbeat_timeout_s=60.0)
LEADER, FOLLOWER = RANKS = "learner rank 0", "learner rank 1"
INCARNATION = 3
LONG_AGO_S = 1e6  # seconds before now; needed because the virtual clock does not change time.monotonic


class WatchedRanks:
    """Two ranks with heartbeats, and the watch of their process."""

    def __init__(self, folder: RunFolder) -> None:
        folder.shared_memory.mkdir(parents=True)
        self._folder = folder
        self.process = SimulatedProcess()
        self.watch = HeartbeatWatch(RANKS, INCARNATION, SETTINGS, folder)
        self.waiting = asyncio.create_task(self.watch.wait_for_exit(self.process))  # pyright: ignore[reportArgumentType]

    def run_operations(self, rank: str, *operations: tuple[str, float, float], incarnation: int = INCARNATION) -> None:
        """Start operations. Each operation has a name, its seconds since the start, and its limit in seconds."""
        running = [RunningOperation(name, time.monotonic() - age_s, limit_s) for name, age_s, limit_s in operations]
        content = {"incarnation": incarnation, "operations": running}
        operations_path(self._folder, rank).write_bytes(msgspec.json.encode(content))

    async def beat(self, ranks: Sequence[str], seconds: int, incarnation: int = INCARNATION) -> None:
        for _ in range(seconds):
            for rank in ranks:
                self.watch.on_heartbeat(Heartbeat(rank, incarnation, 0.0, 0, 0, 0))
            await asyncio.sleep(SETTINGS.heartbeat_s)

    async def wait(self) -> Hang:
        hang = await self.waiting
        assert hang is not None
        return hang


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(RunFolder, "shared_memory", tmp_path / "memory")
    return RunFolder(tmp_path)


async def test_ranks_with_heartbeats_and_unlimited_operations_do_not_hang(folder: RunFolder) -> None:
    ranks = WatchedRanks(folder)
    ranks.run_operations(LEADER, ("wait for a batch", LONG_AGO_S, 0.0))
    ranks.run_operations(FOLLOWER, ("step 2", LONG_AGO_S, 0.0), ("save", 500.0, 600.0))
    await ranks.beat(RANKS, 1000)
    assert not ranks.waiting.done()
    ranks.process.end(1)
    assert await ranks.waiting is None


async def test_a_long_watch_waits_for_its_process_once(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process object keeps the future of every wait, even of a cancelled one, until the process ends."""
    waits, wait = 0, SimulatedProcess.wait

    async def count_wait(self: SimulatedProcess) -> int | None:
        nonlocal waits
        waits += 1
        return await wait(self)

    monkeypatch.setattr(SimulatedProcess, "wait", count_wait)
    ranks = WatchedRanks(folder)
    await ranks.beat(RANKS, 1000)
    assert waits == 1
    ranks.process.end(0)
    assert await ranks.waiting is None


@pytest.mark.slow
@pytest.mark.real_clock
async def test_a_watch_keeps_no_futures_of_its_iterations(tmp_path: Path) -> None:
    settings = SupervisionConfig(heartbeat_s=0.001, heartbeat_timeout_s=600.0, first_heartbeat_timeout_s=600.0)
    process = await asyncio.create_subprocess_exec("sleep", "100")
    watching = asyncio.create_task(
        HeartbeatWatch([LEADER], INCARNATION, settings, RunFolder(tmp_path)).wait_for_exit(process)
    )
    await asyncio.sleep(0.1)
    before = count_futures()
    await asyncio.sleep(1.0)
    assert count_futures() - before < 10
    process.kill()
    assert await watching is None


def count_futures() -> int:
    gc.collect()
    return sum(isinstance(each, asyncio.Future) for each in gc.get_objects())


async def test_a_rank_without_heartbeats_is_named_with_its_operations(folder: RunFolder) -> None:
    ranks = WatchedRanks(folder)
    await ranks.beat(RANKS, 100)
    ranks.run_operations(FOLLOWER, ("step 2", 14.0, 0.0), ("save", 4.0, 600.0))
    await ranks.beat([LEADER], 10)
    assert not ranks.waiting.done()
    await ranks.beat([LEADER], 2)
    hang = await ranks.wait()
    assert hang.cause.startswith("learner rank 1: no heartbeat for 11.0 s, in step 2 since 14.")
    assert ", in save since 4." in hang.cause
    assert hang.duration_s == 11.0


@pytest.mark.parametrize("others", [(LEADER, INCARNATION), (FOLLOWER, INCARNATION - 1), ("generator-0", INCARNATION)])
async def test_heartbeats_of_other_senders_do_not_count_for_a_rank(folder: RunFolder, others: tuple[str, int]) -> None:
    ranks = WatchedRanks(folder)
    await ranks.beat(RANKS, 1)
    sender, incarnation = others
    await ranks.beat([sender], 15, incarnation)
    assert FOLLOWER in (await ranks.wait()).cause


async def test_a_rank_that_starts_has_a_longer_timeout(folder: RunFolder) -> None:
    ranks = WatchedRanks(folder)
    await ranks.beat([LEADER], 60)
    assert not ranks.waiting.done()
    await ranks.beat([LEADER], 3)
    assert (await ranks.wait()).cause == "learner rank 1: no heartbeat for 61.0 s"


async def test_an_operation_over_its_time_limit_counts_as_a_hang_despite_heartbeats(folder: RunFolder) -> None:
    ranks = WatchedRanks(folder)
    await ranks.beat(RANKS, 20)
    ranks.run_operations(LEADER, ("step 2", 30.0, 0.0), ("save", 9.0, 12.0))
    ranks.run_operations(FOLLOWER, ("step 2", 30.0, 0.0), ("save", 13.0, 12.0), incarnation=INCARNATION - 1)
    await ranks.beat(RANKS, 2)
    assert not ranks.waiting.done()
    ranks.run_operations(FOLLOWER, ("step 2", 30.0, 0.0), ("save", 13.0, 12.0))
    await ranks.beat(RANKS, 2)
    hang = await ranks.wait()
    assert hang.cause.startswith("learner rank 1: in step 2 since 30.")
    assert hang.cause.endswith(", limit of save: 12 s")
    assert 13.0 <= hang.duration_s < 14.0


async def test_a_late_rank_is_named_before_the_rank_that_waits_for_it(folder: RunFolder) -> None:
    ranks = WatchedRanks(folder)
    await ranks.beat(RANKS, 20)
    await ranks.beat([LEADER], 5)
    ranks.run_operations(LEADER, ("reduction", 5.0, 4.0))
    await ranks.beat([LEADER], 2)
    named = [part.partition(":")[0] for part in (await ranks.wait()).cause.split("; ")]
    assert named == [FOLLOWER, LEADER]


async def test_the_time_in_which_the_launcher_was_suspended_is_not_counted(folder: RunFolder) -> None:
    ranks = WatchedRanks(folder)
    await ranks.beat(RANKS, 20)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += 1000.0
    ranks.run_operations(LEADER, ("save", 1000.0, 12.0))
    await ranks.beat(RANKS, 12)
    assert not ranks.waiting.done()
    await ranks.beat(RANKS, 3)
    assert (await ranks.wait()).cause.startswith("learner rank 0: in save since 1000.")
