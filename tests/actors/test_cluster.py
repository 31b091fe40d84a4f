"""The nodes of a run, as its launcher keeps them: who is welcomed, who hears of whom, and what becomes of those who are gone.
Under a virtual clock, with the book of addresses on disk as processes read it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.cluster import Cluster, first_listeners, listeners
from actors.commands import session_of
from actors.executors import Executors
from actors.wiring import HEAD, LAUNCHER, LEARNER, ROLLOUT
from bus.book import Book, Network
from bus.curve import load_key, make_key
from bus.in_process import Hub
from bus.messages import (
    AnyMessage,
    EngineLeft,
    ExecutorJoined,
    ExecutorLeft,
    ExecutorProved,
    LearnerWanted,
    NodeArrived,
    NodeBeat,
    NodeLeft,
    NodesChanged,
    NodeWelcomed,
    ProcessEnded,
    Shutdown,
)
from bus.transport import Bus
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Cluster as ClusterSection
from configs.schema import Run, Supervision
from tests.simulation.clock import run_virtually

SILENT_S = 6.0
FIRST = NodeArrived("node@a", "10.0.0.2", 29_700, 2, 1)
SECOND = NodeArrived("node@b", "10.0.0.3", 29_700, -1, -1)


class Display:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, progress: object) -> None:
        raise AssertionError("a cluster shows no progress")

    def close(self) -> None: ...


class Site:
    """Node 0, and who is on the bus with it."""

    def __init__(self, folder: Path, section: ClusterSection, boot: int = 1) -> None:
        settings = Supervision(heartbeat_s=1.0, silent_s=SILENT_S)
        self.run = Run(name="demo", cluster=section, supervision=settings)
        self.folder = RunFolder(folder)
        self._hub = Hub()
        self.buses: dict[str, Bus] = {name: self._hub.join(name, 1000) for name in (HEAD, ROLLOUT, LAUNCHER)}
        self.display = Display()
        self.learner_ends = 0
        bus = self.buses[LAUNCHER]
        self.executing = Executors((), (ROLLOUT,), bus, lambda name, life: (name, str(life)))
        known = first_listeners(self.run, (HEAD, ROLLOUT, "generator-0", "executor-0", LEARNER))
        self.cluster = Cluster(self.run, self.folder, boot, bus, known, self.executing, self._end_learner, self.display)

    async def _end_learner(self) -> None:
        self.learner_ends += 1

    async def arrive(self, *arrived: NodeArrived) -> None:
        for each in arrived:
            self.buses[each.node] = self._hub.join(each.node, 1000)
            await self.cluster.take(each.node, each)

    async def heard(self, process: str) -> list[AnyMessage]:
        for _ in range(20):
            await asyncio.sleep(0)
        bus, messages = self.buses[process], list[AnyMessage]()
        while bus.waiting:
            messages.append((await bus.receive()).message)
        return messages

    @property
    def book(self) -> Book:
        return msgspec.json.decode((self.folder.sockets / "book").read_bytes(), type=Book)


def play(
    folder: Path, scenario: Callable[[Site], Coroutine[Any, Any, None]], *, nodes: int = 3, learner_nodes: int = 1
) -> None:
    section = ClusterSection(nodes=nodes, learner_nodes=learner_nodes, key="cluster.key", host="10.0.0.1")

    async def begin() -> None:
        await scenario(Site(folder, section))

    sockets = RunFolder(folder).sockets
    sockets.mkdir()
    try:
        run_virtually(begin())
    finally:
        shutil.rmtree(sockets)


def test_a_node_is_numbered_and_told_what_to_run_and_where_everybody_listens(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST, SECOND)
        (welcome, told) = await site.heard("node@a")
        assert isinstance(welcome, NodeWelcomed) and isinstance(told, NodesChanged)
        assert (welcome.number, welcome.boot, welcome.run_folder) == (1, 1, str(tmp_path))
        assert welcome.generators == ("generator-0@1", "generator-1@1")
        assert welcome.executors == ("executor-0@1",)
        assert {each.process for each in welcome.listeners} == {
            *(LAUNCHER, HEAD, ROLLOUT, "generator-0", "executor-0", LEARNER, "weights"),
            *("node@a", "generator-0@1", "generator-1@1", "executor-0@1"),
        }
        assert [each.process for each in told.joined] == ["node@b", "generator-0@2", "executor-0@2"]
        (second,) = await site.heard("node@b")
        assert isinstance(second, NodeWelcomed)
        assert {*welcome.listeners, *told.joined} == set(second.listeners)
        assert len({(each.host, each.port) for each in second.listeners}) == len(second.listeners)

    play(tmp_path, scenario)


def test_a_number_of_an_earlier_launch_is_not_given_again_and_its_sessions_are_over(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST, SECOND)
        again = Site(tmp_path, site.run.cluster, boot=2)
        await again.arrive(NodeArrived("node@c", "10.0.0.2", 29_700, 0, 1))
        assert "executor-0@3" in again.book.entries
        assert session_of(1, life=1_000) < again.book.first_session <= session_of(2)

    play(tmp_path, scenario)


def test_a_node_that_is_not_heard_is_gone_with_its_engines_and_executors(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST, SECOND)
        await site.executing.joined(ExecutorJoined("executor-0@1/1", 1))
        await site.heard(ROLLOUT)
        await site.heard("node@b")
        watching = asyncio.create_task(site.cluster.watch())
        for _ in range(int(SILENT_S) + 2):
            await asyncio.sleep(1.0)
            await site.cluster.take("node@b", NodeBeat())
        cause = "node 1 left: not heard for 7.0 s"
        lost = [EngineLeft(f"generator-{index}@1", cause, 2**31 - 1) for index in range(2)]
        assert await site.heard(ROLLOUT) == [*lost, ExecutorLeft("executor-0@1/1", cause)]
        assert await site.heard(HEAD) == [lost[0], lost[0], lost[1], lost[1]]  # the arbiter and the recipe
        gone = ("node@a", "generator-0@1", "generator-1@1", "executor-0@1")
        assert [told for told in await site.heard("node@b") if told != NodeBeat()] == [NodesChanged((), gone)]
        assert site.book.gone == list(gone)
        assert not site.book.entries.keys() & set(gone)
        await site.executing.joined(ExecutorJoined("executor-0@1/2", 1))  # it was on its way
        assert await site.heard(ROLLOUT) == []
        watching.cancel()

    play(tmp_path, scenario)


def test_a_launcher_that_was_held_up_itself_gives_nobody_up(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST)
        watching = asyncio.create_task(site.cluster.watch())
        await asyncio.sleep(2.0)
        asyncio.get_running_loop().now += 100  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.sleep(2.0)
        assert await site.heard(HEAD) == []
        assert site.book.gone == []
        watching.cancel()

    play(tmp_path, scenario)


def test_what_a_node_says_once_it_is_gone_is_not_heard(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST)
        await site.cluster.take("node@a", NodeLeft("it was told to end"))
        assert len(await site.heard(ROLLOUT)) == 2
        await site.cluster.take("node@a", ProcessEnded("generator-0@1", 1, "later"))
        await site.cluster.take("node@a", NodeLeft("again"))
        assert await site.heard(ROLLOUT) == []

    play(tmp_path, scenario)


def test_a_node_that_comes_again_is_another_one(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST, msgspec.structs.replace(FIRST, node="node@c"))
        assert site.book.gone == ["node@a", "generator-0@1", "generator-1@1", "executor-0@1"]
        (welcome,) = await site.heard("node@c")
        assert isinstance(welcome, NodeWelcomed)
        assert welcome.generators == ("generator-0@2", "generator-1@2")

    play(tmp_path, scenario)


def test_the_end_of_a_process_elsewhere_is_told_as_of_one_here(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST)
        await site.executing.joined(ExecutorJoined("executor-0@1/1", 1))
        await site.heard(ROLLOUT)
        await site.cluster.take("node@a", ProcessEnded("generator-1@1", 3, "it died"))
        await site.cluster.take("node@a", ProcessEnded("executor-0@1", 1, "it died"))
        left = EngineLeft("generator-1@1", "it died", 3)
        assert await site.heard(ROLLOUT) == [left, ExecutorLeft("executor-0@1/1", "it died")]
        assert await site.heard(HEAD) == [left, left]

    play(tmp_path, scenario)


def test_an_executor_that_has_proved_itself_is_forgiven_where_it_is_kept_alive(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST, SECOND)
        await site.heard("node@a")
        await site.heard("node@b")
        await site.cluster.take("executor-0@2", ExecutorProved("executor-0@2/1"))
        assert await site.heard("node@a") == []
        assert await site.heard("node@b") == [ExecutorProved("executor-0@2/1")]

    play(tmp_path, scenario)


# ---------------------------------------------------------------- the learner's ranks


def test_the_learner_waits_for_the_nodes_that_the_run_begins_with_and_trains_on_the_first(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        beginning = asyncio.create_task(site.cluster.until_learner_may_begin(4, 1))
        await asyncio.sleep(1)
        await site.arrive(FIRST)
        await asyncio.sleep(100)
        assert not beginning.done()
        await site.arrive(SECOND)
        meeting = await beginning
        assert meeting is not None
        assert (meeting.at.host, meeting.node_rank, meeting.nodes) == ("10.0.0.1", 0, 2)
        wanted = LearnerWanted(1, 4, 1, 2, meeting.at.host, meeting.at.port)
        assert [told for told in await site.heard("node@a") if isinstance(told, LearnerWanted)] == [wanted]
        assert not [told for told in await site.heard("node@b") if isinstance(told, LearnerWanted)]
        assert "waiting for nodes, 1 of 3 are here: asterism join tcp://10.0.0.1:29700" in site.display.said

    play(tmp_path, scenario, learner_nodes=2)


def test_ranks_that_end_end_the_learner_and_a_node_that_is_gone_is_replaced(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST, SECOND)
        await site.cluster.until_learner_may_begin(0, 1)
        await site.cluster.take("node@b", ProcessEnded("learner@2", 1, "it trains nothing"))
        assert site.learner_ends == 0
        await site.cluster.take("node@a", ProcessEnded("learner@1", 1, "it died"))
        assert site.learner_ends == 1
        await site.cluster.until_learner_may_begin(0, 2)
        await site.cluster.take("node@a", ProcessEnded("learner@1", 1, "it died"))  # of the life that is over
        assert site.learner_ends == 1
        await site.cluster.take("node@a", NodeLeft("it was told to end"))
        assert site.learner_ends == 2
        await site.heard("node@b")
        meeting = await site.cluster.until_learner_may_begin(0, 3)  # two nodes are enough to go on
        assert meeting is not None
        assert await site.heard("node@b") == [LearnerWanted(3, 0, 1, 2, meeting.at.host, meeting.at.port)]

    play(tmp_path, scenario, learner_nodes=2)


def test_where_no_step_is_left_nobody_is_waited_for_who_does_not_train(tmp_path: Path) -> None:
    """The nodes of a run that was killed after its last step have ended with it."""

    async def scenario(site: Site) -> None:
        assert await site.cluster.until_learner_may_begin(site.run.rl.steps, 1) is None

    play(tmp_path, scenario)


def test_without_ranks_elsewhere_they_meet_nowhere(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        assert await site.cluster.until_learner_may_begin(0, 1) is None

    play(tmp_path, scenario, nodes=1)


# ---------------------------------------------------------------- the end


def test_at_the_end_all_nodes_are_told_and_waited_for(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST, SECOND)
        ending = asyncio.create_task(site.cluster.end(4.0))
        for name in ("node@a", "node@b"):
            assert Shutdown() in await site.heard(name)
            assert not ending.done()
            await site.buses[name].send(LAUNCHER, NodeLeft("the run is over"))
        await ending
        assert asyncio.get_running_loop().time() == 0

    play(tmp_path, scenario)


def test_a_node_that_does_not_answer_is_left_behind(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST)
        await site.cluster.end(4.0)
        assert asyncio.get_running_loop().time() == 4.0

    play(tmp_path, scenario)


# ---------------------------------------------------------------- addresses


def test_a_node_with_more_processes_than_ports_is_told_so() -> None:
    assert len(listeners(1, "10.0.0.2", 29_700, "node@a", ["p"] * 43)) == 44
    with pytest.raises(UnusableInput, match="enough for 43 processes, not for 44"):
        listeners(1, "10.0.0.2", 29_700, "node@a", ["p"] * 44)


def test_the_book_is_one_that_processes_can_read(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.arrive(FIRST)
        network = Network(load_key(make_key(tmp_path / "keys")), site.folder.sockets)
        entry = network.entry("generator-1@1")
        assert entry is not None
        assert (entry.address.host, entry.address.port, entry.node) == ("10.0.0.2", 29_704, 1)
        assert not network.is_near(entry)

    play(tmp_path, scenario)
