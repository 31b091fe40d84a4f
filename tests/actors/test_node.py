"""A further node of a run, from its first word to its last: what it starts, tells and ends. Under a virtual clock, its
processes and its bus simulated, its book on disk as processes read it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from actors import node
from actors.children import Child, Children, ProcessDied
from actors.node import Ending, Joining, take_part
from actors.wiring import LAUNCHER
from bus.book import Address, Book
from bus.in_process import Hub
from bus.messages import (
    AnyMessage,
    ExecutorProved,
    LearnerWanted,
    Listener,
    NodeArrived,
    NodeBeat,
    NodeLeft,
    NodesChanged,
    NodeWelcomed,
    ProcessEnded,
    RunFinished,
    Shutdown,
)
from bus.structured_log import Refused
from configs.disk import DiskRefused
from configs.errors import UNUSABLE, UnusableInput
from configs.load import write_resolved
from configs.run_folder import RunFolder
from configs.schema import Run, Supervision
from tests.simulation.clock import run_virtually
from tests.simulation.processes import SimulatedProcess

SETTINGS = Supervision(heartbeat_s=1.0, silent_s=6.0)
BOOT = 4
GENERATOR, EXECUTOR = "generator-0@3", "executor-0@3"


class Nursery(Children):
    """Starts nothing, and keeps what was to be started."""

    def __init__(self, outputs: Path) -> None:
        super().__init__(RunFolder(outputs))
        self._outputs = outputs
        self.started: list[tuple[str, Sequence[str], Mapping[str, str]]] = []
        self.processes: dict[str, SimulatedProcess] = {}

    async def spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Child:
        self.started.append((name, argv, environment))
        process = self.processes[name] = SimulatedProcess()
        child = Child(name, process, self._outputs / f"{name}.out")  # pyright: ignore[reportArgumentType]
        self._children[name] = child
        return child

    async def kill(self, name: str) -> None:
        self.processes[name].end(-9)

    def lives(self, name: str) -> list[str]:
        return [argv[argv.index("--life") + 1] for started, argv, _ in self.started if started == name]


class Site:
    """Node 0's launcher, and the node."""

    def __init__(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = Hub()
        self.folder = folder
        self.launcher = hub.join(LAUNCHER, 10_000)
        self.children = Nursery(folder.logs)
        self.refused: Refused
        monkeypatch.setattr(node, "Children", lambda folder: self.children)
        monkeypatch.setattr(node, "configure", self._configure)
        monkeypatch.setattr(node, "zmq_bus", lambda name, sockets, bound, session, network: hub.join(name, bound))
        self.said: list[str] = []
        self.name = ""
        self.interrupted = asyncio.Event()
        self.joining = Joining(Address("127.0.0.1", 29_600), Address("127.0.0.1", 29_700), Path("cluster.key"))
        self.node: asyncio.Task[Ending]

    def _configure(self, folder: RunFolder, process: str, level: str, refused: Refused) -> None:
        self.refused = refused

    def begin(self) -> None:
        self.node = asyncio.create_task(take_part(self.joining, self.said.append, self.interrupted))

    async def hear(self) -> AnyMessage:
        """What is no beat."""
        while isinstance(message := (await self.launcher.receive()).message, NodeBeat):
            pass
        return message

    async def tell(self, *messages: AnyMessage) -> None:
        for message in messages:
            await self.launcher.send(self.name, message)
        await asyncio.sleep(0.5)

    async def welcome(self, *, generators: Sequence[str] = (), executors: Sequence[str] = (), boot: int = BOOT) -> None:
        self.begin()
        arrived = await self.hear()
        assert isinstance(arrived, NodeArrived)
        assert (arrived.host, arrived.port, arrived.generators, arrived.executors) == ("127.0.0.1", 29_700, -1, -1)
        self.name = arrived.node
        listeners = (Listener(LAUNCHER, 0, "127.0.0.1", 29_600), Listener(self.name, 3, "127.0.0.1", 29_700))
        path = str(self.folder.path)
        await self.tell(NodeWelcomed(3, boot, path, tuple(generators), tuple(executors), listeners))

    @property
    def book(self) -> Book:
        return msgspec.json.decode((self.joining.own_folder.sockets / "book").read_bytes(), type=Book)


Play = Callable[[Callable[[Site], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.boots.write_text(f"{BOOT}\n")
    write_resolved(Run(name="demo", supervision=SETTINGS), folder.config)
    monkeypatch.setattr(node, "network_of", lambda sockets: None)

    def play(scenario: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
        async def live() -> None:
            site = Site(folder, monkeypatch)
            try:
                await scenario(site)
            finally:
                site.node.cancel()
                await asyncio.gather(site.node, return_exceptions=True)
            assert not site.joining.own_folder.sockets.exists()
            assert not site.joining.own_folder.shared_memory.exists()

        run_virtually(live())

    return play


def test_it_keeps_what_it_was_told_to_alive_until_the_run_is_over(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome(generators=[GENERATOR], executors=[EXECUTOR])
        assert sorted(name for name, _, _ in site.children.started) == [EXECUTOR, GENERATOR]
        assert site.said == [f"node 3 of the run in {site.folder.path}: {GENERATOR}, {EXECUTOR}"]
        await site.tell(Shutdown())
        assert await site.hear() == NodeLeft("the run is over")
        assert await site.node == "over"
        assert all(process.returncode is not None for process in site.children.processes.values())

    play(scenario)


def test_its_book_says_who_listens_where_and_who_is_gone(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome()
        assert site.said[-1].endswith(": ready to train")
        assert (site.book.node, set(site.book.entries)) == (3, {LAUNCHER, site.name})
        other = Listener("generator-0@4", 4, "10.0.0.4", 29_602)
        await site.tell(NodesChanged((other,), ()))
        assert site.book.entries["generator-0@4"].address == Address("10.0.0.4", 29_602)
        await site.tell(NodesChanged((), ("generator-0@4",)))
        assert "generator-0@4" not in site.book.entries
        assert list(site.book.gone) == ["generator-0@4"]

    play(scenario)


def test_a_process_that_ends_is_told_of_and_started_again(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome(generators=[GENERATOR])
        site.children.processes[GENERATOR].end(-9)
        assert await site.hear() == ProcessEnded(GENERATOR, 1, f"{GENERATOR} ended with exit code -9")
        await asyncio.sleep(3 * SETTINGS.backoff_s)
        assert site.children.lives(GENERATOR) == ["1", "2"]

    play(scenario)


def test_a_process_whose_first_life_finds_something_unusable_ends_the_node(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome(generators=[GENERATOR], executors=[EXECUTOR])
        site.folder.logs.mkdir()
        (site.folder.logs / f"{GENERATOR}.out").write_text("there is no GPU 7\n")
        site.children.processes[GENERATOR].end(UNUSABLE)
        with pytest.raises(ProcessDied, match=r"(?s)exit code 2.*there is no GPU 7"):
            await site.node
        assert await site.hear() == NodeLeft("it failed")
        assert site.children.processes[EXECUTOR].returncode is not None

    play(scenario)


def test_a_node_whose_log_the_disk_refuses_ends_and_says_which_file(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome(generators=[GENERATOR])
        site.refused(DiskRefused("logs/launcher@3.jsonl", errno.ENOSPC))
        with pytest.raises(DiskRefused, match=r"^logs/launcher@3\.jsonl: No space left on device$"):
            await site.node
        assert await site.hear() == NodeLeft("it failed")
        assert site.children.processes[GENERATOR].returncode is not None

    play(scenario)


def test_a_launcher_that_has_fallen_silent_has_given_it_up(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome(generators=[GENERATOR])
        for _ in range(5):
            await asyncio.sleep(SETTINGS.silent_s - 2)
            await site.tell(NodeBeat())
        assert not site.node.done()
        await asyncio.sleep(SETTINGS.silent_s + 2)
        assert await site.node == "lost"
        assert await site.hear() == NodeLeft("it heard nobody")
        assert site.children.processes[GENERATOR].returncode is not None

    with capture_logs() as said:
        play(scenario)
    assert [entry["event"] for entry in said if entry["log_level"] == "error"] == ["node.cut_off"]


def test_who_is_told_to_end_says_so(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome()
        site.interrupted.set()
        assert await site.node == "interrupted"
        assert await site.hear() == NodeLeft("it was told to end")

    play(scenario)


@pytest.mark.parametrize("interrupted", [False, True])
def test_who_is_not_welcomed_says_that_it_waits_until_it_has_waited_enough(play: Play, interrupted: bool) -> None:
    async def scenario(site: Site) -> None:
        site.joining = site.joining._replace(patience_s=25.0)
        site.begin()
        await asyncio.sleep(21)
        waits = "no answer yet from tcp://127.0.0.1:29600: nobody listens there, or not with the key in cluster.key"
        assert site.said == [waits] * 2
        assert not site.node.done()
        if interrupted:
            site.interrupted.set()
        assert await site.node == ("interrupted" if interrupted else "unheard")

    play(scenario)


def test_a_folder_that_is_not_the_runs_is_refused(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome(generators=[GENERATOR], boot=BOOT + 1)
        with pytest.raises(
            UnusableInput, match=r"this is not the folder of the run at tcp://127\.0\.0\.1:29600; .* --run-folder"
        ):
            await site.node
        assert site.children.started == []

    play(scenario)


def wanted(life: int) -> LearnerWanted:
    return LearnerWanted(life, 2, 1, 2, "127.0.0.1", 29_690 + life)


def test_ranks_of_a_later_life_take_the_place_of_those_before(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome()
        await site.tell(wanted(1))
        first = site.children.processes["learner@3"]
        (_, argv, environment) = site.children.started[0]
        assert list(argv[argv.index("--node-rank") :][:2]) == ["--node-rank", "1"]
        assert list(argv[argv.index("--master-port") :][:2]) == ["--master-port", "29691"]
        assert environment["GLOO_SOCKET_IFNAME"] == "lo"
        await site.tell(wanted(2))
        assert first.returncode == -9
        assert site.children.lives("learner@3") == ["1", "2"]
        (site.folder.logs).mkdir()
        (site.folder.logs / "learner@3.out").write_text("gloo: connection closed\n")
        site.children.processes["learner@3"].end(1)
        cause = "learner@3 ended with exit code 1: gloo: connection closed"
        assert await site.hear() == ProcessEnded("learner@3", 2, cause)  # of the first life's end nothing is told
        await site.tell(wanted(3))
        site.children.processes["learner@3"].end(0)
        await site.tell(wanted(4), Shutdown())
        assert await site.hear() == NodeLeft("the run is over")
        await site.node
        assert site.children.processes["learner@3"].returncode == -9

    play(scenario)


def test_the_proof_of_an_executor_forgives_its_deaths_and_what_is_not_for_a_node_is_said(play: Play) -> None:
    async def scenario(site: Site) -> None:
        await site.welcome(executors=[EXECUTOR])
        for life in range(1, 2 * SETTINGS.restarts):
            await site.tell(ExecutorProved(f"{EXECUTOR}/{life}"))
            site.children.processes[EXECUTOR].end(-9)
            await site.tell(NodeBeat())
            for _ in range(4):
                await site.tell(NodeBeat())
        await site.tell(RunFinished(3))
        assert not site.node.done()
        assert len(site.children.lives(EXECUTOR)) == 2 * SETTINGS.restarts

    with capture_logs() as said:
        play(scenario)
    assert [entry["kind"] for entry in said if entry["event"] == "message.misdirected"] == ["RunFinished"]
