"""A network under a virtual clock: the real links of bus.links, over connections that delay, break, repeat and part.

A connection leads from one lane of a process to another process: parcels go one way, acknowledgements the other, each in
their order. When it breaks, what is under way on it is lost. A parcel or an acknowledgement may come again later, in the
middle of others. Between two processes that are parted nothing passes. What arrives where nobody lives is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from random import Random

import msgspec

from bus.lanes import Lane
from bus.links import Limits, Links
from bus.parcels import Ack, Parcel
from bus.transport import Bus, Delivery, Inbox

_APART_S = 1e-9  # between two parcels of a connection: the loop keeps no order among timers of one moment
_WAITING = 4  # parcels that wait for a reader, before the sender is told that there is no room
_PER_S = 200.0  # one over the mean delay


class Weather(msgspec.Struct, frozen=True):
    lags: float = 0.0  # share of all parcels and acknowledgements that take a second longer, and with them what follows
    breaks: float = 0.0  # share of all parcels with which their connection breaks
    repeats: float = 0.0  # share of all parcels and acknowledgements that come again
    echoes: float = 0.0  # share of all frames to HEARS_TWICE that are received a second time: no link would do that


HEARS_TWICE = (
    "head",
    "rollout-",
    "generator-",
)  # executors, the learner and the launcher do not look for what comes twice
ECHO_WITHIN_S = 30.0


class CheckedInbox(Inbox):
    """Frames come once and in the order of their numbers, whatever their connection does. `heard` keeps them, with when."""

    def __init__(self, bound: int, heard: list[tuple[float, Delivery]]) -> None:
        super().__init__(bound)
        self._heard = heard
        self._next: dict[tuple[str, Lane, int], int] = {}

    def put(self, lane: Lane, deliveries: Sequence[Delivery]) -> None:
        for one in deliveries:
            link = (one.sender, lane, one.session)
            assert one.number == self._next.get(link, one.number), f"{link}: frame {one.number}, not {self._next[link]}"
            self._next[link] = one.number + 1
        now = asyncio.get_running_loop().time()
        self._heard += [(now, one) for one in deliveries]
        super().put(lane, deliveries)

    def echo(self, lane: Lane, delivery: Delivery) -> None:
        super().put(lane, [delivery])


class Network:
    def __init__(self, random: Random, weather: Weather, limits: Limits) -> None:
        self.random, self.weather, self.limits = random, weather, limits
        self.members: dict[str, SimulatedWire] = {}  # those that live
        self.happened: Counter[str] = Counter()
        self.heard: dict[
            tuple[str, int], list[tuple[float, Delivery]]
        ] = {}  # by process and session: what came, and when
        self._parted: dict[frozenset[str], float] = {}  # until when

    def join(self, process: str, session: int) -> Bus:
        heard = self.heard[process, session] = []
        inbox = CheckedInbox(self.limits.window_messages, heard)
        links = Links(process, session, inbox, self.limits)
        links.wire = self.members[process] = wire = SimulatedWire(self, links)
        inbox.when_drained = wire.read
        return Bus(process, inbox, links)

    def kill(self, process: str) -> None:
        """Nothing that it still does reaches anybody."""
        self.members.pop(process).dead = True
        for member in self.members.values():
            member.carry_on(process)

    def part(self, one: str, other: str, seconds: float) -> None:
        self.happened["partition"] += 1
        self._parted[frozenset((one, other))] = asyncio.get_running_loop().time() + seconds

    def heal(self) -> None:
        """From now on nothing breaks."""
        self._parted.clear()
        self.weather = Weather()

    def are_parted(self, one: str, other: str, now: float) -> bool:
        return bool(self._parted) and self._parted.get(frozenset((one, other)), 0.0) > now

    def delay_s(self) -> float:
        delay_s = self.random.expovariate(_PER_S)
        if self.weather.lags and self.random.random() < self.weather.lags:
            delay_s += self.random.expovariate(1)
        return delay_s


class SimulatedWire:
    """Implements bus.links.Wire."""

    def __init__(self, network: Network, links: Links) -> None:
        self.network, self.links = network, links
        self.dead = False
        self.process = links.process
        self._connections: dict[tuple[str, Lane], Connection] = {}
        self._unread: defaultdict[Lane, deque[tuple[Connection, Parcel]]] = defaultdict(deque)
        self.num_unread: Counter[Connection] = Counter()

    # ---------------------------------------------------------------- what goes out

    def carry(self, process: str, lane: Lane, parcel: Parcel) -> bool:
        if self.dead:
            return True
        connection = self._connections.get((process, lane))
        if connection is None:
            connection = self._connections[process, lane] = Connection(self, process, lane)
        return connection.carry(parcel)

    def carry_on(self, process: str) -> None:
        """What waited to be read there has died with it."""
        for (to, _), connection in self._connections.items():
            if to == process:
                connection.carry_on()

    def part(self, process: str) -> None:
        for key in [key for key in self._connections if key[0] == process]:
            self._connections.pop(key).break_down()

    async def close(self) -> None:
        self.dead = True
        if self.network.members.get(self.process) is self:
            del self.network.members[self.process]

    # ---------------------------------------------------------------- what comes in

    def arrived(self, connection: Connection, lane: Lane, parcel: Parcel) -> None:
        if self.links.inbox.full(lane):
            self._unread[lane].append((connection, parcel))
            self.num_unread[connection] += 1
        else:
            self._take(connection, lane, parcel)

    def _take(self, connection: Connection, lane: Lane, parcel: Parcel) -> None:
        incoming, weather = self.links.arrived, self.network.weather
        incoming(lane, parcel, partial(connection.answer, connection.num_broken))
        if weather.echoes and self.process.startswith(HEARS_TWICE):
            self._echo(lane, parcel)

    def _echo(self, lane: Lane, parcel: Parcel) -> None:
        draw, loop = self.network.random, asyncio.get_running_loop()
        inbox = self.links.inbox
        for number, frame in enumerate(parcel.frames, parcel.first):
            if draw.random() < self.network.weather.echoes and isinstance(inbox, CheckedInbox):
                self.network.happened["echo"] += 1
                delivery = Delivery(frame, parcel.sender, lane, parcel.session, number)
                after_s = draw.choice([draw.expovariate(1), draw.uniform(0, ECHO_WITHIN_S)])
                loop.call_later(after_s, inbox.echo, lane, delivery)

    def read(self, lane: Lane) -> None:
        """The inbox has room again."""
        unread = self._unread[lane]
        while unread and not self.links.inbox.full(lane):
            connection, parcel = unread.popleft()
            self.num_unread[connection] -= 1
            self._take(connection, lane, parcel)
            connection.carry_on()


class Connection:
    def __init__(self, wire: SimulatedWire, process: str, lane: Lane) -> None:
        self._wire, self._process, self._lane = wire, process, lane
        self._network = wire.network
        self._loop = asyncio.get_running_loop()
        self._there = self._back = 0.0  # when the last parcel, and the last acknowledgement, arrives
        self._refused = False
        self.num_broken = 0

    def carry(self, parcel: Parcel) -> bool:
        receiver = self._network.members.get(self._process)
        if receiver is not None and receiver.num_unread[self] >= _WAITING:
            self._refused = True
            self._network.happened["refusal"] += 1
            return False
        weather, draw = self._network.weather, self._network.random.random
        if weather.breaks and draw() < weather.breaks:
            self._network.happened["break"] += 1
            self.break_down()
            return True
        self._there = at = max(self._there + _APART_S, self._loop.time() + self._network.delay_s())
        self._loop.call_at(at, self._arrive, self.num_broken, parcel)
        if weather.repeats and draw() < weather.repeats:
            self._network.happened["repeat"] += 1
            self._loop.call_at(at + self._network.random.expovariate(5), self._arrive, self.num_broken, parcel)
        return True

    def carry_on(self) -> None:
        if self._refused and not self._wire.dead:
            self._refused = False
            self._loop.call_soon(self._wire.links.carry_on, self._process, self._lane)

    def break_down(self) -> None:
        self.num_broken += 1

    def _arrive(self, num_broken: int, parcel: Parcel) -> None:
        receiver = self._network.members.get(self._process)
        if self._is_lost(num_broken) or receiver is None:
            return
        receiver.arrived(self, self._lane, parcel)

    def answer(self, num_broken: int, ack: Ack) -> None:
        receiver = self._network.members.get(self._process)
        if num_broken != self.num_broken or receiver is None or receiver.links.session != ack.receiver:
            return  # who says it is dead
        self._back = at = max(self._back + _APART_S, self._loop.time() + self._network.delay_s())
        self._loop.call_at(at, self._hear, num_broken, ack)
        weather = self._network.weather
        if weather.repeats and self._network.random.random() < weather.repeats:
            self._loop.call_at(at + self._network.random.expovariate(5), self._hear, num_broken, ack)

    def _hear(self, num_broken: int, ack: Ack) -> None:
        if not self._is_lost(num_broken) and not self._wire.dead:
            self._wire.links.hear(self._process, self._lane, ack)

    def _is_lost(self, num_broken: int) -> bool:
        return num_broken != self.num_broken or self._network.are_parted(
            self._wire.process, self._process, self._loop.time()
        )
