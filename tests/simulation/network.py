"""A network under a virtual clock: asterism.bus.transport.reliable_transport over faulty connections.

A connection carries the packets of one lane of a process to another process, in order, and
returns the acknowledgements, in order. A break loses all packets and acknowledgements in
transit. Packets and acknowledgements can arrive a second time, out of order. A partition
between two processes drops all traffic between them. A dead receiver drops all traffic to it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from random import Random

import msgspec

from asterism.actors.launch.command_lines import compute_link_epoch
from asterism.bus.bus import Bus, Delivery, Inbox
from asterism.bus.lanes import Lane
from asterism.bus.transport.packets import Ack, Packet
from asterism.bus.transport.reliable_transport import LinkLimits, ReliableTransport

_APART_S = 1e-9  # seconds between packets: the loop does not order timers with equal times
_WAITING = 4  # limit of unread packets per connection
_PER_S = 200.0  # 1 / mean delay in seconds


class NetworkFaults(msgspec.Struct, frozen=True):
    lags: float = 0.0  # share of packets and acknowledgements with 1 s extra delay
    breaks: float = 0.0  # share of packets that break their connection
    repeats: float = 0.0  # share of packets and acknowledgements that arrive twice
    echoes: float = 0.0  # share of frames to DETECTS_DUPLICATES that the inbox delivers twice


DETECTS_DUPLICATES = ("head", "rollout-", "generator-")  # executors, learner and launcher do not detect duplicates
ECHO_WITHIN_S = 30.0


class CheckedInbox(Inbox):
    """An inbox that checks the order of frames and records their arrival times."""

    def __init__(self, bound: int, received: list[tuple[float, Delivery]]) -> None:
        super().__init__(bound)
        self.received = received  # arrival time and delivery of each frame
        self._next: dict[tuple[str, Lane, int], int] = {}

    def put(self, lane: Lane, deliveries: Sequence[Delivery]) -> None:
        for one in deliveries:
            link = (one.sender, lane, one.epoch)
            assert one.number == self._next.get(link, one.number), f"{link}: frame {one.number}, not {self._next[link]}"
            self._next[link] = one.number + 1
        now = asyncio.get_running_loop().time()
        self.received += [(now, one) for one in deliveries]
        super().put(lane, deliveries)

    def echo(self, lane: Lane, delivery: Delivery) -> None:
        super().put(lane, [delivery])


class Network:
    def __init__(self, random: Random, faults: NetworkFaults, limits: LinkLimits) -> None:
        self.random, self.faults, self.limits = random, faults, limits
        self.members: dict[str, SimulatedWire] = {}  # the live processes
        self.happened: Counter[str] = Counter()
        self.received: dict[tuple[str, int], list[tuple[float, Delivery]]] = {}  # by process and session
        self._partitions: dict[frozenset[str], float] = {}  # end of each partition

    def join(self, process: str, session: int) -> Bus:
        received = self.received[process, session] = []
        inbox = CheckedInbox(self.limits.window_messages, received)
        links = ReliableTransport(process, session, inbox, self.limits)
        links.first_epoch = compute_link_epoch(session // compute_link_epoch(1))  # as the launcher's address book does
        links.wire = self.members[process] = wire = SimulatedWire(self, links)
        inbox.on_drained = wire.read
        return Bus(process, inbox, links)

    def kill(self, process: str) -> None:
        """Drop all later messages from and to a process."""
        self.members.pop(process).dead = True
        for member in self.members.values():
            member.resume(process)

    def partition(self, one: str, other: str, seconds: float) -> None:
        self.happened["partition"] += 1
        self._partitions[frozenset((one, other))] = asyncio.get_running_loop().time() + seconds

    def heal(self) -> None:
        """Stop all faults."""
        self._partitions.clear()
        self.faults = NetworkFaults()

    def are_partitioned(self, one: str, other: str, now: float) -> bool:
        return bool(self._partitions) and self._partitions.get(frozenset((one, other)), 0.0) > now

    def delay_s(self) -> float:
        delay_s = self.random.expovariate(_PER_S)
        if self.faults.lags and self.random.random() < self.faults.lags:
            delay_s += self.random.expovariate(1)
        return delay_s


class SimulatedWire:
    """Implements asterism.bus.transport.reliable_transport.Wire."""

    def __init__(self, network: Network, links: ReliableTransport) -> None:
        self.network, self.links = network, links
        self.dead = False
        self.process = links.process
        self._connections: dict[tuple[str, Lane], Connection] = {}
        self._unread: defaultdict[Lane, deque[tuple[Connection, Packet]]] = defaultdict(deque)
        self.num_unread: Counter[Connection] = Counter()

    # ---------------------------------------------------------------- outgoing packets

    def send(self, process: str, lane: Lane, packet: Packet) -> bool:
        if self.dead:
            return True
        connection = self._connections.get((process, lane))
        if connection is None:
            connection = self._connections[process, lane] = Connection(self, process, lane)
        return connection.carry(packet)

    def resume(self, process: str) -> None:
        """Resume connections that a process, now killed, had refused."""
        for (to, _), connection in self._connections.items():
            if to == process:
                connection.resume()

    def disconnect(self, process: str) -> None:
        for key in [key for key in self._connections if key[0] == process]:
            self._connections.pop(key).break_down()

    async def close(self) -> None:
        self.dead = True
        if self.network.members.get(self.process) is self:
            del self.network.members[self.process]

    # ---------------------------------------------------------------- incoming packets

    def arrived(self, connection: Connection, lane: Lane, packet: Packet) -> None:
        if self.links.inbox.is_full(lane):
            self._unread[lane].append((connection, packet))
            self.num_unread[connection] += 1
        else:
            self._take(connection, lane, packet)

    def _take(self, connection: Connection, lane: Lane, packet: Packet) -> None:
        inbox = self.links.inbox
        assert isinstance(inbox, CheckedInbox)
        num_received = len(inbox.received)
        self.links.on_packet(lane, packet, partial(connection.answer, connection.num_broken))
        if self.network.faults.echoes and self.process.startswith(DETECTS_DUPLICATES):
            self._echo(lane, inbox, [delivery for _, delivery in inbox.received[num_received:]])

    def _echo(self, lane: Lane, inbox: CheckedInbox, deliveries: Sequence[Delivery]) -> None:
        """Deliver some frames again. The transport has accepted them: it refuses those of an earlier launch."""
        draw, loop = self.network.random, asyncio.get_running_loop()
        for delivery in deliveries:
            if draw.random() < self.network.faults.echoes:
                self.network.happened["echo"] += 1
                after_s = draw.choice([draw.expovariate(1), draw.uniform(0, ECHO_WITHIN_S)])
                loop.call_later(after_s, inbox.echo, lane, delivery)

    def read(self, lane: Lane) -> None:
        """Deliver unread packets while the inbox has room."""
        unread = self._unread[lane]
        while unread and not self.links.inbox.is_full(lane):
            connection, packet = unread.popleft()
            self.num_unread[connection] -= 1
            self._take(connection, lane, packet)
            connection.resume()


class Connection:
    def __init__(self, wire: SimulatedWire, process: str, lane: Lane) -> None:
        self._wire, self._process, self._lane = wire, process, lane
        self._network = wire.network
        self._loop = asyncio.get_running_loop()
        self._there = self._back = 0.0  # arrival of the last packet and of the last acknowledgement
        self._refused = False
        self.num_broken = 0

    def carry(self, packet: Packet) -> bool:
        receiver = self._network.members.get(self._process)
        if receiver is not None and receiver.num_unread[self] >= _WAITING:
            self._refused = True
            self._network.happened["refusal"] += 1
            return False
        faults, draw = self._network.faults, self._network.random.random
        if faults.breaks and draw() < faults.breaks:
            self._network.happened["break"] += 1
            self.break_down()
            return True
        self._there = at = max(self._there + _APART_S, self._loop.time() + self._network.delay_s())
        self._loop.call_at(at, self._arrive, self.num_broken, packet)
        if faults.repeats and draw() < faults.repeats:
            self._network.happened["repeat"] += 1
            self._loop.call_at(at + self._network.random.expovariate(5), self._arrive, self.num_broken, packet)
        return True

    def resume(self) -> None:
        if self._refused and not self._wire.dead:
            self._refused = False
            self._loop.call_soon(self._wire.links.on_writable, self._process, self._lane)

    def break_down(self) -> None:
        self.num_broken += 1

    def _arrive(self, num_broken: int, packet: Packet) -> None:
        receiver = self._network.members.get(self._process)
        if self._is_lost(num_broken) or receiver is None:
            return
        receiver.arrived(self, self._lane, packet)

    def answer(self, num_broken: int, ack: Ack) -> None:
        receiver = self._network.members.get(self._process)
        if num_broken != self.num_broken or receiver is None or receiver.links.epoch != ack.receiver_epoch:
            return  # the sender of the acknowledgement is dead
        self._back = at = max(self._back + _APART_S, self._loop.time() + self._network.delay_s())
        self._loop.call_at(at, self._deliver_ack, num_broken, ack)
        faults = self._network.faults
        if faults.repeats and self._network.random.random() < faults.repeats:
            self._loop.call_at(at + self._network.random.expovariate(5), self._deliver_ack, num_broken, ack)

    def _deliver_ack(self, num_broken: int, ack: Ack) -> None:
        if not self._is_lost(num_broken) and not self._wire.dead:
            self._wire.links.on_ack(self._process, self._lane, ack)

    def _is_lost(self, num_broken: int) -> bool:
        return num_broken != self.num_broken or self._network.are_partitioned(
            self._wire.process, self._process, self._loop.time()
        )
