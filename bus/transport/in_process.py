"""Transport between actors in one process. Frames are lost only when a member leaves."""

from __future__ import annotations

import asyncio
from functools import partial

from asterism.bus.bus import Bus, BusFactory, Inbox
from asterism.bus.lanes import LANES, Lane
from asterism.bus.transport.packets import Ack, Packet
from asterism.bus.transport.reliable_transport import LinkLimits, ReliableTransport
from asterism.configs.schema.run_config import RunConfig


def make_in_process_bus_factory(run: RunConfig, hub: Hub) -> BusFactory:
    return lambda process, epoch: hub.join(process, run.bus.queue_messages, epoch)


class Hub:
    """The members of one in-process bus."""

    def __init__(self) -> None:
        self.members: dict[str, ReliableTransport] = {}
        self.blocked_senders: set[tuple[str, str, Lane]] = set()  # sender, receiver, lane

    def join(self, process: str, queue_messages: int, epoch: int = 0) -> Bus:
        if process in self.members:
            raise ValueError(f"the address {process} is in use")
        inbox = Inbox(queue_messages)
        transport = ReliableTransport(
            process, epoch, inbox, LinkLimits(queue_messages, ack_delay_s=0.0, probe_after_s=None)
        )
        transport.wire = InProcessWire(self, transport)
        inbox.on_drained = partial(self._notify_writable, process)
        self.members[process] = transport
        asyncio.get_running_loop().call_soon(self._on_joined, process)
        return Bus(process, inbox, transport)

    def _on_joined(self, process: str) -> None:
        """Let the members send to the process, which can be a new incarnation."""
        for lane in LANES:
            self._notify_writable(process, lane)
        for member in self.members.values():
            member.probe(process)

    def _notify_writable(self, process: str, lane: Lane) -> None:
        """Let blocked senders send: the inbox of the process has space for their packets."""
        for blocked in [key for key in self.blocked_senders if key[1:] == (process, lane)]:
            self.blocked_senders.discard(blocked)
            if blocked[0] in self.members:
                asyncio.get_running_loop().call_soon(self.members[blocked[0]].on_writable, process, lane)


class InProcessWire:
    """Implements asterism.bus.transport.reliable_transport.Wire."""

    def __init__(self, hub: Hub, transport: ReliableTransport) -> None:
        self._hub = hub
        self._transport = transport

    def send(self, process: str, lane: Lane, packet: Packet) -> bool:
        member = self._hub.members.get(process)
        if member is None or member.inbox.is_full(lane):
            self._hub.blocked_senders.add((self._transport.process, process, lane))
            return False
        member.on_packet(lane, packet, partial(self._send_ack, process, lane))
        return True

    def _send_ack(self, process: str, lane: Lane, ack: Ack) -> None:
        asyncio.get_running_loop().call_soon(self._transport.on_ack, process, lane, ack)

    def disconnect(self, process: str) -> None:
        pass

    async def close(self) -> None:
        self._hub.members.pop(self._transport.process, None)
