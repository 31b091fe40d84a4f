"""Cluster membership on node 0: joins, departures, and the notices to the other nodes."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from asterism.actors.launch.command_lines import compute_link_epoch
from asterism.actors.launch.executor_registry import ExecutorRegistry
from asterism.actors.launch.membership import ClusterMembership, assign_head_ports, assign_ports
from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, LAUNCHER, LEARNER, ROLLOUT
from asterism.bus.bus import Bus
from asterism.bus.transport.address_book import AddressBook, Network
from asterism.bus.transport.curve_auth import generate_key, load_key
from asterism.bus.transport.in_process import Hub
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import ClusterConfig, SupervisionConfig
from asterism.configs.schema.run_config import RunConfig
from tests.simulation.processes import RecordedDisplay

TIMEOUT_S = 6.0
FIRST = msg.JoinRequested("node@a", "10.0.0.2", 29_700, 2, 1)
SECOND = msg.JoinRequested("node@b", "10.0.0.3", 29_700, -1, -1)


class Site:
    """Node 0 and the processes on its bus."""

    def __init__(self, folder: Path, cluster: ClusterConfig, launch: int = 1) -> None:
        settings = SupervisionConfig(heartbeat_s=1.0, heartbeat_timeout_s=TIMEOUT_S)
        self.run = RunConfig(name="demo", cluster=cluster, supervision=settings)
        self.folder = RunFolder(folder)
        self._hub = Hub()
        self.buses: dict[str, Bus] = {name: self._hub.join(name, 1000) for name in (HEAD, ROLLOUT, LAUNCHER)}
        self.display = RecordedDisplay()
        self.learner_kills = 0
        bus = self.buses[LAUNCHER]
        self.executors = ExecutorRegistry((), (ROLLOUT,), bus, lambda name, incarnation: (name, str(incarnation)))
        listeners = assign_head_ports(self.run, (HEAD, ROLLOUT, "generator-0", "executor-0", LEARNER))
        self.cluster = ClusterMembership(
            self.run, self.folder, launch, bus, listeners, self.executors, self._kill_learner, self.display
        )

    async def _kill_learner(self) -> None:
        self.learner_kills += 1

    async def join(self, *requests: msg.JoinRequested) -> None:
        for each in requests:
            self.buses[each.node] = self._hub.join(each.node, 1000)
            await self.cluster.handle_message(each.node, each)

    async def drain(self, process: str) -> list[msg.AnyMessage]:
        for _ in range(20):
            await asyncio.sleep(0)
        bus, messages = self.buses[process], list[msg.AnyMessage]()
        while bus.waiting:
            messages.append((await bus.receive()).message)
        return messages

    @property
    def address_book(self) -> AddressBook:
        return msgspec.json.decode((self.folder.sockets / "book").read_bytes(), type=AddressBook)


@pytest.fixture(params=[1])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Site]:
    """Open a site. The parameter of the fixture is the number of nodes that train."""

    @asynccontextmanager
    async def open_site() -> AsyncIterator[Site]:
        cluster = ClusterConfig(nodes=3, learner_nodes=request.param, key="cluster.key", host="10.0.0.1")
        site = Site(tmp_path, cluster)
        site.folder.sockets.mkdir()
        yield site
        shutil.rmtree(site.folder.sockets)

    return open_site()


async def test_a_joining_node_gets_a_number_its_processes_and_all_addresses(site: Site, tmp_path: Path) -> None:
    await site.join(FIRST, SECOND)
    (accepted, change) = await site.drain("node@a")
    assert isinstance(accepted, msg.JoinAccepted) and isinstance(change, msg.MembershipChanged)
    assert (accepted.node_number, accepted.launch, accepted.run_folder) == (1, 1, str(tmp_path))
    assert accepted.generators == ("generator-0@1", "generator-1@1")
    assert accepted.executors == ("executor-0@1",)
    assert {each.process for each in accepted.listeners} == {
        *(LAUNCHER, HEAD, ROLLOUT, "generator-0", "executor-0", LEARNER, "weights"),
        *("node@a", "generator-0@1", "generator-1@1", "executor-0@1"),
    }
    assert [each.process for each in change.joined] == ["node@b", "generator-0@2", "executor-0@2"]
    (second,) = await site.drain("node@b")
    assert isinstance(second, msg.JoinAccepted)
    assert {*accepted.listeners, *change.joined} == set(second.listeners)
    assert len({(each.host, each.port) for each in second.listeners}) == len(second.listeners)


async def test_node_numbers_are_not_reused_and_epochs_of_an_earlier_launch_are_stale(
    site: Site, tmp_path: Path
) -> None:
    await site.join(FIRST, SECOND)
    again = Site(tmp_path, site.run.cluster, launch=2)
    await again.join(msg.JoinRequested("node@c", "10.0.0.2", 29_700, 0, 1))
    assert "executor-0@3" in again.address_book.entries
    assert compute_link_epoch(1, incarnation=1_000) < again.address_book.first_epoch <= compute_link_epoch(2)


async def test_a_node_without_heartbeats_is_removed_with_its_engines_and_executors(site: Site) -> None:
    await site.join(FIRST, SECOND)
    await site.executors.on_joined(msg.ExecutorJoined("executor-0@1/1", 1))
    await site.drain(ROLLOUT)
    await site.drain("node@b")
    watching = asyncio.create_task(site.cluster.monitor_heartbeats())
    for _ in range(int(TIMEOUT_S) + 2):
        await asyncio.sleep(1.0)
        await site.cluster.handle_message("node@b", msg.NodeHeartbeat())
    cause = "node 1 left: no heartbeat for 7.0 s"
    lost = [msg.EngineLeft(f"generator-{index}@1", cause, 2**31 - 1) for index in range(2)]
    assert await site.drain(ROLLOUT) == [*lost, msg.ExecutorLeft("executor-0@1/1", cause)]
    assert await site.drain(HEAD) == [lost[0], lost[0], lost[1], lost[1]]  # arbiter and recipe receive each message
    departed = ("node@a", "generator-0@1", "generator-1@1", "executor-0@1")
    assert [change for change in await site.drain("node@b") if change != msg.NodeHeartbeat()] == [
        msg.MembershipChanged((), departed)
    ]
    assert site.address_book.departed == list(departed)
    assert not site.address_book.entries.keys() & set(departed)
    await site.executors.on_joined(msg.ExecutorJoined("executor-0@1/2", 1))  # the event was in flight
    assert await site.drain(ROLLOUT) == []
    watching.cancel()


async def test_a_launcher_that_was_suspended_removes_no_node(site: Site) -> None:
    await site.join(FIRST)
    watching = asyncio.create_task(site.cluster.monitor_heartbeats())
    await asyncio.sleep(2.0)
    asyncio.get_running_loop().now += 100  # pyright: ignore[reportAttributeAccessIssue]
    await asyncio.sleep(2.0)
    assert await site.drain(HEAD) == []
    assert site.address_book.departed == []
    watching.cancel()


async def test_messages_of_a_removed_node_are_ignored(site: Site) -> None:
    await site.join(FIRST)
    await site.cluster.handle_message("node@a", msg.NodeLeft("interrupted"))
    assert len(await site.drain(ROLLOUT)) == 2
    await site.cluster.handle_message("node@a", msg.ProcessEnded("generator-0@1", 1, "later"))
    await site.cluster.handle_message("node@a", msg.NodeLeft("again"))
    assert await site.drain(ROLLOUT) == []


async def test_a_node_that_joins_again_is_a_new_node(site: Site) -> None:
    await site.join(FIRST, msgspec.structs.replace(FIRST, node="node@c"))
    assert site.address_book.departed == ["node@a", "generator-0@1", "generator-1@1", "executor-0@1"]
    (accepted,) = await site.drain("node@c")
    assert isinstance(accepted, msg.JoinAccepted)
    assert accepted.generators == ("generator-0@2", "generator-1@2")


async def test_the_exit_of_a_remote_process_is_announced_like_a_local_one(site: Site) -> None:
    await site.join(FIRST)
    await site.executors.on_joined(msg.ExecutorJoined("executor-0@1/1", 1))
    await site.drain(ROLLOUT)
    await site.cluster.handle_message("node@a", msg.ProcessEnded("generator-1@1", 3, "it died"))
    await site.cluster.handle_message("node@a", msg.ProcessEnded("executor-0@1", 1, "it died"))
    left = msg.EngineLeft("generator-1@1", "it died", 3)
    assert await site.drain(ROLLOUT) == [left, msg.ExecutorLeft("executor-0@1/1", "it died")]
    assert await site.drain(HEAD) == [left, left]


async def test_an_executors_health_is_forwarded_to_the_launcher_of_its_node(site: Site) -> None:
    await site.join(FIRST, SECOND)
    await site.drain("node@a")
    await site.drain("node@b")
    await site.cluster.handle_message("executor-0@2", msg.ExecutorHealthy("executor-0@2/1"))
    assert await site.drain("node@a") == []
    assert await site.drain("node@b") == [msg.ExecutorHealthy("executor-0@2/1")]


# ---------------------------------------------------------------- the learner's ranks


@pytest.mark.parametrize("site", [2], indirect=True)
async def test_the_learner_waits_for_all_initial_nodes_and_trains_on_the_first(site: Site) -> None:
    waiting = asyncio.create_task(site.cluster.wait_for_learner_nodes(4, 1))
    await asyncio.sleep(1)
    await site.join(FIRST)
    await asyncio.sleep(100)
    assert not waiting.done()
    await site.join(SECOND)
    rendezvous = await waiting
    assert rendezvous is not None
    assert (rendezvous.address.host, rendezvous.node_rank, rendezvous.num_nodes) == ("10.0.0.1", 0, 2)
    request = msg.LearnerRanksRequested(1, 4, 1, 2, rendezvous.address.host, rendezvous.address.port)
    assert [change for change in await site.drain("node@a") if isinstance(change, msg.LearnerRanksRequested)] == [
        request
    ]
    assert not [change for change in await site.drain("node@b") if isinstance(change, msg.LearnerRanksRequested)]
    assert "waiting for nodes, 1 of 3 have joined: asterism join tcp://10.0.0.1:29700" in site.display.lines


@pytest.mark.parametrize("site", [2], indirect=True)
async def test_the_exit_of_a_rank_restarts_the_learner_and_a_departed_node_is_replaced(site: Site) -> None:
    await site.join(FIRST, SECOND)
    await site.cluster.wait_for_learner_nodes(0, 1)
    await site.cluster.handle_message("node@b", msg.ProcessEnded("learner@2", 1, "it has no ranks"))
    assert site.learner_kills == 0
    await site.cluster.handle_message("node@a", msg.ProcessEnded("learner@1", 1, "it died"))
    assert site.learner_kills == 1
    await site.cluster.wait_for_learner_nodes(0, 2)
    await site.cluster.handle_message(
        "node@a", msg.ProcessEnded("learner@1", 1, "it died")
    )  # an exit of the previous incarnation
    assert site.learner_kills == 1
    await site.cluster.handle_message("node@a", msg.NodeLeft("interrupted"))
    assert site.learner_kills == 2
    await site.drain("node@b")
    rendezvous = await site.cluster.wait_for_learner_nodes(0, 3)  # two nodes are enough to continue
    assert rendezvous is not None
    assert await site.drain("node@b") == [
        msg.LearnerRanksRequested(3, 0, 1, 2, rendezvous.address.host, rendezvous.address.port)
    ]


async def test_a_restarted_learner_and_a_run_without_remaining_steps_wait_only_for_training_nodes(site: Site) -> None:
    """A run that was killed after its last step has no nodes left, and needs none."""
    assert await site.cluster.wait_for_learner_nodes(0, 2) is None
    assert await site.cluster.wait_for_learner_nodes(site.run.rl.steps, 1) is None


# ---------------------------------------------------------------- shutdown


async def test_shutdown_is_sent_to_all_nodes_and_waits_for_them(site: Site) -> None:
    await site.join(FIRST, SECOND)
    ending = asyncio.create_task(site.cluster.shut_down(4.0))
    for name in ("node@a", "node@b"):
        assert msg.Shutdown() in await site.drain(name)
        assert not ending.done()
        await site.buses[name].send(LAUNCHER, msg.NodeLeft("the run is over"))
    await ending
    assert asyncio.get_running_loop().time() == 0


async def test_a_node_that_does_not_leave_in_time_is_abandoned(site: Site) -> None:
    await site.join(FIRST)
    await site.cluster.shut_down(4.0)
    assert asyncio.get_running_loop().time() == 4.0


# ---------------------------------------------------------------- addresses


def test_a_node_with_more_processes_than_ports_is_refused() -> None:
    assert len(assign_ports(1, "10.0.0.2", 29_700, "node@a", ["p"] * 43)) == 44
    with pytest.raises(UnusableInput, match="enough for 43 processes, not for 44"):
        assign_ports(1, "10.0.0.2", 29_700, "node@a", ["p"] * 44)


async def test_processes_can_read_the_address_book(site: Site, tmp_path: Path) -> None:
    await site.join(FIRST)
    network = Network(load_key(generate_key(tmp_path / "keys")), site.folder.sockets)
    entry = network.find_entry("generator-1@1")
    assert entry is not None
    assert (entry.address.host, entry.address.port, entry.node) == ("10.0.0.2", 29_704, 1)
    assert not network.is_local(entry)
