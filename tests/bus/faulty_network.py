"""A network that delays, reorders, duplicates and loses the packets of a ReliableTransport, under a virtual clock."""

import asyncio
import random
from collections.abc import Callable
from functools import partial

import msgspec

from asterism.bus.bus import Bus, Inbox
from asterism.bus.lanes import Lane
from asterism.bus.transport.packets import Ack, Packet, decode_ack, decode_packet, encode_ack, encode_packet
from asterism.bus.transport.reliable_transport import LinkLimits, ReliableTransport


class FaultRates(msgspec.Struct, frozen=True):
    """The rates of faults, as shares of all packets and acknowledgements."""

    lost: float = 0.0
    duplicated: float = 0.0
    delayed: float = 0.0
    full: float = 0.0  # packets that the wire refuses at first because it is full


class FaultyNetwork:
    """A network of members, each in its current incarnation."""

    def __init__(self, seed: int, rates: FaultRates) -> None:
        self.random = random.Random(seed)
        self.rates = rates
        self.members: dict[str, ReliableTransport] = {}
        self.broken = False  # whether all packets are lost

    def join(self, process: str, queue_messages: int, epoch: int = 0) -> Bus:
        inbox = Inbox(queue_messages)
        transport = ReliableTransport(process, epoch, inbox, LinkLimits(queue_messages))
        transport.wire = FaultyWire(self, transport)
        self.members[process] = transport
        return Bus(process, inbox, transport)

    def kill(self, process: str) -> None:
        """Remove a member without closing it."""
        del self.members[process]

    def send(self, deliver: Callable[[], object]) -> None:
        loop, draw, rates = asyncio.get_running_loop(), self.random.random, self.rates
        for _ in range(2 if draw() < rates.duplicated else 1):
            if draw() >= rates.lost:
                after_s = 0.001 + (self.random.expovariate(5) if draw() < rates.delayed else 0.0)
                loop.call_later(after_s, self._deliver_now, deliver)

    def _deliver_now(self, deliver: Callable[[], object]) -> None:
        if not self.broken:
            deliver()


class FaultyWire:
    """An implementation of reliable_transport.Wire that loses packets for a full inbox."""

    def __init__(self, network: FaultyNetwork, transport: ReliableTransport) -> None:
        self._network = network
        self._transport = transport

    def send(self, process: str, lane: Lane, packet: Packet) -> bool:
        if self._network.random.random() < self._network.rates.full:
            asyncio.get_running_loop().call_later(0.01, self._transport.on_writable, process, lane)
            return False
        self._network.send(partial(self._deliver, process, lane, encode_packet(packet)))
        return True

    def _deliver(self, process: str, lane: Lane, data: bytes) -> None:
        member = self._network.members.get(process)
        if member is not None and not member.inbox.is_full(lane):
            member.on_packet(lane, decode_packet(data), partial(self._send_ack, process, lane))

    def _send_ack(self, process: str, lane: Lane, ack: Ack) -> None:
        self._network.send(partial(self._on_ack, process, lane, encode_ack(ack)))

    def _on_ack(self, process: str, lane: Lane, data: bytes) -> None:
        if self._network.members.get(self._transport.process) is self._transport:
            self._transport.on_ack(process, lane, decode_ack(data))

    def disconnect(self, process: str) -> None:
        pass

    async def close(self) -> None:
        pass
