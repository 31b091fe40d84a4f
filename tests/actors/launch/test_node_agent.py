"""A node takes part in a run from its join request to its end. The processes and the bus are simulated."""

import asyncio
import errno
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from asterism.actors.launch import node_agent
from asterism.actors.launch.child_processes import ProcessDied
from asterism.actors.launch.join_handshake import JoinOptions
from asterism.actors.launch.node_agent import NodeEnding, join_once
from asterism.bus import messages as msg
from asterism.bus.addresses import LAUNCHER, LEARNER
from asterism.bus.process.exit_reason import ExitReason, write_exit_reason
from asterism.bus.process.heartbeat import Heartbeat
from asterism.bus.process.structured_log import DiskErrorHandler
from asterism.bus.transport.address_book import AddressBook, TcpAddress
from asterism.bus.transport.in_process import Hub
from asterism.configs.atomic_write import DiskError
from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SupervisionConfig
from asterism.configs.schema.run_config import RunConfig
from tests.simulation.processes import SimulatedChildren

SETTINGS = SupervisionConfig(heartbeat_s=1.0, heartbeat_timeout_s=6.0)
LAUNCH = 4
GENERATOR, EXECUTOR = "generator-0@3", "executor-0@3"


class Site:
    """Node 0's launcher, and one other node."""

    def __init__(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = Hub()
        self.folder = folder
        self.launcher = hub.join(LAUNCHER, 10_000)
        self.children = SimulatedChildren(folder.logs)
        self.on_log_error: DiskErrorHandler
        monkeypatch.setattr(node_agent, "ChildProcesses", lambda folder: self.children)
        monkeypatch.setattr(node_agent, "configure_logging", self._configure)
        monkeypatch.setattr(
            node_agent, "open_zmq_bus", lambda name, sockets, bound, epoch, network: hub.join(name, bound)
        )
        self.lines: list[str] = []
        self.name = ""
        self.interrupted = asyncio.Event()
        self.options = JoinOptions(
            TcpAddress("127.0.0.1", 29_600), TcpAddress("127.0.0.1", 29_700), Path("cluster.key")
        )
        self.node: asyncio.Task[NodeEnding]

    def _configure(self, folder: RunFolder, process: str, level: str, on_log_error: DiskErrorHandler) -> None:
        self.on_log_error = on_log_error

    def begin(self) -> None:
        self.node = asyncio.create_task(join_once(self.options, self.lines.append, self.interrupted))

    async def receive(self) -> msg.AnyMessage:
        """Receive the next message that is not a heartbeat."""
        while isinstance(message := (await self.launcher.receive()).message, msg.NodeHeartbeat):
            pass
        return message

    async def send(self, *messages: msg.AnyMessage) -> None:
        for message in messages:
            await self.launcher.send(self.name, message)
        await asyncio.sleep(0.5)

    async def join(
        self, *, generators: Sequence[str] = (), executors: Sequence[str] = (), launch: int = LAUNCH
    ) -> None:
        self.begin()
        request = await self.receive()
        assert isinstance(request, msg.JoinRequested)
        assert (request.host, request.port, request.generators, request.executors) == ("127.0.0.1", 29_700, -1, -1)
        self.name = request.node
        listeners = (msg.Listener(LAUNCHER, 0, "127.0.0.1", 29_600), msg.Listener(self.name, 3, "127.0.0.1", 29_700))
        path = str(self.folder.path)
        await self.send(msg.JoinAccepted(3, launch, path, tuple(generators), tuple(executors), listeners))

    def list_incarnations(self, name: str) -> list[str]:
        return [read_option(start.argv, "--incarnation") for start in self.children.list_starts(name)]

    @property
    def address_book(self) -> AddressBook:
        return msgspec.json.decode((self.options.own_folder.sockets / "book").read_bytes(), type=AddressBook)


@pytest.fixture
@asynccontextmanager
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    folder.launch_counter.write_text(f"{LAUNCH}\n")
    write_resolved(RunConfig(name="demo", supervision=SETTINGS), folder.config)
    monkeypatch.setattr(node_agent, "load_network", lambda sockets: None)
    site = Site(folder, monkeypatch)
    try:
        yield site
    finally:
        site.node.cancel()
        await asyncio.gather(site.node, return_exceptions=True)
    assert not site.options.own_folder.sockets.exists()
    assert not site.options.own_folder.shared_memory.exists()


async def test_a_node_runs_its_processes_until_the_run_is_over(site: Site) -> None:
    await site.join(generators=[GENERATOR], executors=[EXECUTOR])
    assert sorted(start.name for start in site.children.started) == [EXECUTOR, GENERATOR]
    assert site.lines == [f"node 3 of the run in {site.folder.path}: {GENERATOR}, {EXECUTOR}"]
    await site.send(msg.Shutdown())
    assert await site.receive() == msg.NodeLeft("the run is over")
    assert await site.node == "over"
    assert all(process.returncode is not None for process in site.children.processes.values())


async def test_the_address_book_of_a_node_follows_joins_and_departures(site: Site) -> None:
    await site.join()
    assert site.lines[-1].endswith(": ready to train")
    assert (site.address_book.node, set(site.address_book.entries)) == (3, {LAUNCHER, site.name})
    other = msg.Listener("generator-0@4", 4, "10.0.0.4", 29_602)
    await site.send(msg.MembershipChanged((other,), ()))
    assert site.address_book.entries["generator-0@4"].address == TcpAddress("10.0.0.4", 29_602)
    await site.send(msg.MembershipChanged((), ("generator-0@4",)))
    assert "generator-0@4" not in site.address_book.entries
    assert list(site.address_book.departed) == ["generator-0@4"]


async def test_a_process_that_ends_is_reported_and_restarted(site: Site) -> None:
    await site.join(generators=[GENERATOR])
    site.children.processes[GENERATOR].end(-9)
    assert await site.receive() == msg.ProcessEnded(GENERATOR, 1, f"{GENERATOR} was killed by signal 9")
    await asyncio.sleep(3 * SETTINGS.backoff_s)
    assert site.list_incarnations(GENERATOR) == ["1", "2"]


async def test_unusable_input_in_a_first_incarnation_ends_the_node(site: Site) -> None:
    await site.join(generators=[GENERATOR], executors=[EXECUTOR])
    (site.folder.logs / f"{GENERATOR}.out").write_text("there is no GPU 7\n")
    site.children.processes[GENERATOR].end(EXIT_UNUSABLE)
    with pytest.raises(ProcessDied, match=r"(?s)exit code 2.*there is no GPU 7"):
        await site.node
    assert await site.receive() == msg.NodeLeft("the node failed")
    assert site.children.processes[EXECUTOR].returncode is not None


async def test_a_write_error_of_its_log_ends_a_node_and_names_the_file(site: Site) -> None:
    await site.join(generators=[GENERATOR])
    site.on_log_error(DiskError("logs/launcher@3.jsonl", errno.ENOSPC))
    with pytest.raises(DiskError, match=r"^logs/launcher@3\.jsonl: No space left on device$"):
        await site.node
    assert await site.receive() == msg.NodeLeft("the node failed")
    assert site.children.processes[GENERATOR].returncode is not None


async def test_a_node_without_messages_from_node_0_ends_as_lost(site: Site) -> None:
    with capture_logs() as lines:
        await site.join(generators=[GENERATOR])
        for _ in range(5):
            await asyncio.sleep(SETTINGS.heartbeat_timeout_s - 2)
            await site.send(msg.NodeHeartbeat())
        assert not site.node.done()
        await asyncio.sleep(SETTINGS.heartbeat_timeout_s + 2)
        assert await site.node == "lost"
        assert await site.receive() == msg.NodeLeft("no message from node 0")
        assert site.children.processes[GENERATOR].returncode is not None
    assert [entry["event"] for entry in lines if entry["log_level"] == "error"] == ["node.disconnected"]


async def test_an_interrupted_node_reports_that_it_leaves(site: Site) -> None:
    await site.join()
    site.interrupted.set()
    assert await site.node == "interrupted"
    assert await site.receive() == msg.NodeLeft("interrupted")


@pytest.mark.parametrize("interrupted", [False, True])
async def test_an_unanswered_join_prints_notices_until_its_timeout(site: Site, interrupted: bool) -> None:
    site.options = site.options._replace(join_timeout_s=25.0)
    site.begin()
    await asyncio.sleep(21)
    notice = (
        "no answer yet from tcp://127.0.0.1:29600: no launcher listens there, or it has another key than cluster.key"
    )
    assert site.lines == [notice] * 2
    assert not site.node.done()
    if interrupted:
        site.interrupted.set()
    assert await site.node == ("interrupted" if interrupted else "unanswered")


async def test_the_folder_of_another_run_is_refused(site: Site) -> None:
    await site.join(generators=[GENERATOR], launch=LAUNCH + 1)
    with pytest.raises(UnusableInput, match=r"not the folder of the run at tcp://127\.0\.0\.1:29600\. .* --run-folder"):
        await site.node
    assert site.children.started == []


def read_option(argv: Sequence[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def request_ranks(incarnation: int) -> msg.LearnerRanksRequested:
    return msg.LearnerRanksRequested(incarnation, 2, 1, 2, "127.0.0.1", 29_690 + incarnation)


async def test_ranks_of_a_later_incarnation_replace_the_earlier_ones(site: Site) -> None:
    await site.join()
    await site.send(request_ranks(1))
    first = site.children.processes["learner@3"]
    (start,) = site.children.started
    assert (read_option(start.argv, "--node-rank"), read_option(start.argv, "--master-port")) == ("1", "29691")
    assert start.environment["GLOO_SOCKET_IFNAME"] == "lo"
    await site.send(request_ranks(2))
    assert first.returncode == -9
    assert site.list_incarnations("learner@3") == ["1", "2"]
    (site.folder.logs / "learner@3.out").write_text("gloo: connection closed\n")
    site.children.processes["learner@3"].end(1)
    # The end of the first incarnation is not reported.
    cause = "learner@3 ended with exit code 1: gloo: connection closed"
    assert await site.receive() == msg.ProcessEnded("learner@3", 2, cause)
    await site.send(request_ranks(3))
    site.children.processes["learner@3"].end(0)
    await site.send(request_ranks(4), msg.Shutdown())
    assert await site.receive() == msg.NodeLeft("the run is over")
    await site.node
    assert site.children.processes["learner@3"].returncode == -9


async def test_the_failure_of_a_rank_is_reported_instead_of_the_lines_of_torchrun(site: Site) -> None:
    await site.join()
    folder = RunFolder(site.folder.path, scratch=site.options.own_folder.scratch)
    write_exit_reason(folder, LEARNER, ExitReason("of an earlier incarnation", "outage"))
    await site.send(request_ranks(1))
    write_exit_reason(folder, LEARNER, ExitReason("learner rank 2, in save since 1.0 s: connection closed", "outage"))
    (site.folder.logs / "learner@3.out").write_text("ChildFailedError\n")
    site.children.processes["learner@3"].end(1)
    ended = await site.receive()
    assert isinstance(ended, msg.ProcessEnded)
    assert ended.cause == "learner@3 ended with exit code 1: learner rank 2, in save since 1.0 s: connection closed"


async def test_ranks_that_hang_are_killed_and_reported(site: Site) -> None:
    await site.join()
    await site.send(request_ranks(1))
    sender = str(site.options.own_folder.sockets / "heartbeats")
    heartbeat = Heartbeat("learner rank 1", 1, 0.0, 0, 0, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        for _ in range(3):
            rank.sendto(msgspec.json.encode(heartbeat), sender)
            await site.send(msg.NodeHeartbeat())
            await asyncio.sleep(SETTINGS.heartbeat_s)
    for _ in range(3):
        await asyncio.sleep(SETTINGS.heartbeat_timeout_s / 2)
        await site.send(msg.NodeHeartbeat())
    assert site.children.processes["learner@3"].returncode == -9
    ended = await site.receive()
    assert isinstance(ended, msg.ProcessEnded)
    assert (ended.process, ended.incarnation) == ("learner@3", 1)
    assert re.fullmatch(r"learner@3 was killed by signal 9: learner rank 1: no heartbeat for \d\.\d s", ended.cause)


async def test_a_healthy_executor_resets_its_failures_and_misdirected_messages_are_logged(site: Site) -> None:
    with capture_logs() as lines:
        await site.join(executors=[EXECUTOR])
        for incarnation in range(1, 2 * SETTINGS.restarts):
            await site.send(msg.ExecutorHealthy(f"{EXECUTOR}/{incarnation}"))
            site.children.processes[EXECUTOR].end(-9)
            for _ in range(5):
                await site.send(msg.NodeHeartbeat())
        await site.send(msg.RunFinished(3))
        assert not site.node.done()
        assert len(site.list_incarnations(EXECUTOR)) == 2 * SETTINGS.restarts
    assert [entry["kind"] for entry in lines if entry["event"] == "message.misdirected"] == ["RunFinished"]
