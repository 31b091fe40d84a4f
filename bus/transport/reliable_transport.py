"""All links of one process: the windows of asterism.bus.transport.reliable_stream over a wire.

Frames that are sent to a peer within one iteration of the event loop travel as one packet; no frame waits for
a packet to fill. A sender waits while the window of its lane is full. An acknowledgement is sent shortly after its
first frame is processed, or earlier after a quarter of a window.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import structlog

from asterism.bus.bus import Delivery, Inbox, ReceiveState, SendState
from asterism.bus.lanes import LANES, Lane
from asterism.bus.transport.packets import MAX_PACKET_FRAMES, Ack, Packet
from asterism.bus.transport.reliable_stream import ReceiveWindow, SendWindow

SendAck = Callable[[Ack], None]
MAX_IN_CHANNELS = 65_536  # bound on incoming lanes; packets of further lanes are dropped

_CLOSE_TIMEOUT_S = 0.5  # time that closing waits for peers that have not received all frames
_CLOSE_PROBE_INTERVAL_S = 0.005  # interval of probes during closing
_MAX_PROBE_INTERVAL_S = 2.0


class LinkLimits(msgspec.Struct, frozen=True):
    window_messages: int  # unacknowledged frames of one lane of a link
    window_bytes: int = 256 << 20  # unacknowledged bytes of one lane of a link; the last frame can exceed the bound
    ack_delay_s: float = 0.01
    probe_after_s: float | None = 0.5  # time without progress before a probe; None: the wire never breaks


class Wire(Protocol):
    """A wire that carries packets to peers. It calls `on_packet` and `on_ack` for incoming packets and acks."""

    def send(self, process: str, lane: Lane, packet: Packet) -> bool:
        """Return whether the packet was accepted; if not, the wire calls `on_writable` later."""
        ...

    def disconnect(self, process: str) -> None:
        """Close the connection to the process; no packet follows for the time being."""
        ...

    async def close(self) -> None: ...


class _OutChannel:
    """The sending side of one lane to one peer."""

    __slots__ = (
        *("_limits", "blocked", "flush_scheduled", "has_buffered", "lane", "probe_interval_s", "probed_at", "process"),
        *("send_lock", "window", "window_open"),
    )

    def __init__(self, process: str, lane: Lane, window: SendWindow, limits: LinkLimits) -> None:
        self.process = process
        self.lane: Lane = lane
        self.window = window
        self._limits = limits
        self.send_lock = asyncio.Lock()  # held by the sender that waits for an open window; other senders queue
        self.window_open = asyncio.Event()
        self.flush_scheduled = False
        self.blocked = False  # whether the wire has no space
        self.has_buffered = False  # whether the window can contain frames
        self.probed_at = 0.0  # time of the last probe or of the last progress
        self.probe_interval_s = 0.0

    def is_full(self) -> bool:
        window, limits = self.window, self._limits
        return window.num_buffered >= limits.window_messages or window.num_bytes >= limits.window_bytes

    def flush(self, wire: Wire) -> None:
        while not self.blocked and (packet := self.window.build_packet()) is not None:
            if not wire.send(self.process, self.lane, packet):
                self.window.on_send_refused(packet)
                self.blocked = True

    def send_probe(self, wire: Wire) -> None:
        wire.send(self.process, self.lane, self.window.build_probe())

    def on_progress(self, now: float) -> None:
        self.probed_at, self.probe_interval_s = now, self._limits.probe_after_s or 0.0

    def probe_if_stalled(self, wire: Wire, now: float) -> bool:
        """Return whether frames are unacknowledged. If the probe interval has passed, send a probe."""
        self.has_buffered = self.has_buffered and self.window.num_buffered > 0
        if self.has_buffered and now - self.probed_at >= self.probe_interval_s:
            self.probed_at = now
            self.probe_interval_s = min(2 * self.probe_interval_s, _MAX_PROBE_INTERVAL_S)
            self.send_probe(wire)
        return self.has_buffered

    def drop_buffered(self) -> int:
        """Drop all frames, release waiting senders, and return the number of dropped frames."""
        num_dropped = self.window.drop_buffered()
        self.blocked = False
        self.window_open.set()
        return num_dropped


class _InChannel:
    """The receiving side of one lane from one peer."""

    __slots__ = ("ack_scheduled", "acknowledged_below", "send_ack", "window")

    def __init__(self, window: ReceiveWindow) -> None:
        self.window = window
        self.send_ack: SendAck | None = None  # sends over the last packet's connection
        self.ack_scheduled = False
        self.acknowledged_below = window.acknowledged  # acknowledged number that was last sent to the sender


class ReliableTransport:
    """Implements asterism.bus.bus.Transport. `wire` must be set before any other use."""

    def __init__(self, process: str, epoch: int, inbox: Inbox, limits: LinkLimits) -> None:
        self.process = process
        self.epoch = epoch
        self.inbox = inbox
        self.wire: Wire
        self._limits = limits
        self._ack_every_frames = max(1, limits.window_messages // 4)
        self._loop = asyncio.get_running_loop()
        self._out_channels: dict[tuple[str, Lane], _OutChannel] = {}
        self._in_channels: dict[tuple[str, Lane], _InChannel] = {}
        self._channels_to_flush: list[_OutChannel] = []
        self._channels_to_ack: list[_InChannel] = []
        self._probe_timer: asyncio.TimerHandle | None = None
        self._ack_received = asyncio.Event()  # set by each acknowledgement, for `close`
        self._closed = False
        self._departed: dict[str, int] = {}  # frames dropped since the departure, by departed process
        self.first_epoch = 0  # first epoch of this launch; packets with a lower epoch other than 0 are dropped
        self.accepts_peer: Callable[[str], bool] = lambda process: True  # called before the first packet of a lane
        self.num_dropped = 0  # malformed, unexpected or excess packets; frames from and for departed processes

    # ---------------------------------------------------------------- sending

    async def send_frame(self, process: str, lane: Lane, frame: bytes) -> None:
        channel = self._out_channels.get((process, lane)) or self._add_out_channel(process, lane)
        if channel.is_full() or channel.send_lock.locked():
            async with channel.send_lock:
                while channel.is_full() and not self._closed:
                    channel.window_open.clear()
                    await channel.window_open.wait()
        if self._closed:
            raise ConnectionError(f"the bus of {self.process} is closed")
        if process in self._departed:
            self._count_dropped(process)
            return
        if self._out_channels.get((process, lane)) is not channel:  # the peer was forgotten in the meantime
            self.num_dropped += 1
            return
        channel.window.add(frame)
        if not channel.has_buffered:
            self._start_probing(channel)
        if channel.window.num_unsent >= MAX_PACKET_FRAMES:
            channel.flush(self.wire)
        elif not channel.flush_scheduled:
            self._schedule_flush(channel)

    def _add_out_channel(self, process: str, lane: Lane) -> _OutChannel:
        window = SendWindow(self.process, self.epoch, process)
        channel = self._out_channels[process, lane] = _OutChannel(process, lane, window, self._limits)
        return channel

    def _schedule_flush(self, channel: _OutChannel) -> None:
        channel.flush_scheduled = True
        if not self._channels_to_flush:
            self._loop.call_soon(self._flush_all)
        self._channels_to_flush.append(channel)

    def _flush_all(self) -> None:
        channels, self._channels_to_flush = self._channels_to_flush, []
        for channel in channels:
            channel.flush_scheduled = False
            self._flush(channel)

    def _flush(self, channel: _OutChannel) -> None:
        if not self._closed:
            channel.flush(self.wire)

    def on_writable(self, process: str, lane: Lane) -> None:
        """Send again: the wire has space."""
        if (channel := self._out_channels.get((process, lane))) is not None:
            channel.blocked = False
            self._flush(channel)

    def on_ack(self, process: str, lane: Lane, ack: Ack) -> None:
        channel = self._out_channels[process, lane]
        before = (channel.window.base, channel.window.received_below)
        if not channel.window.on_ack(ack):
            self.num_dropped += 1
            return
        if (channel.window.base, channel.window.received_below) != before:
            channel.on_progress(self._loop.time())
        if not channel.is_full():
            channel.window_open.set()
        self._flush(channel)
        self._ack_received.set()

    def _start_probing(self, channel: _OutChannel) -> None:
        channel.has_buffered = True
        channel.on_progress(self._loop.time())
        if self._probe_timer is None:
            self._start_probe_timer()

    def _start_probe_timer(self) -> None:
        if self._limits.probe_after_s is not None:
            self._probe_timer = self._loop.call_later(self._limits.probe_after_s, self._probe_stalled_peers)

    def _probe_stalled_peers(self) -> None:
        now = self._loop.time()
        any_buffered = [channel.probe_if_stalled(self.wire, now) for channel in self._out_channels.values()]
        self._probe_timer = None
        if any(any_buffered):
            self._start_probe_timer()

    def probe(self, process: str) -> None:
        """Probe the process; call this when a new incarnation can have started."""
        for lane in LANES:
            channel = self._out_channels.get((process, lane))
            if channel is not None and channel.window.num_buffered:
                channel.send_probe(self.wire)

    # ---------------------------------------------------------------- receiving

    def on_packet(self, lane: Lane, packet: Packet, send_ack: SendAck) -> int:
        """Put new frames into the inbox and return their number."""
        if packet.to != self.process or 0 < packet.epoch < self.first_epoch:
            self.num_dropped += 1
            return 0
        if packet.sender in self._departed:
            self._count_dropped(packet.sender)
            return 0
        channel = self._in_channels.get((packet.sender, lane))
        if channel is None:
            if len(self._in_channels) >= MAX_IN_CHANNELS or not self.accepts_peer(packet.sender):
                self.num_dropped += 1
                return 0
            channel = self._in_channels[packet.sender, lane] = _InChannel(ReceiveWindow(self.epoch))
        window = channel.window
        frames = window.accept(packet)
        if packet.epoch == window.epoch:
            channel.send_ack = send_ack
        if frames:
            sender, epoch, first = packet.sender, packet.epoch, window.expected - len(frames)
            numbered = enumerate(frames, first)
            self.inbox.put(lane, [Delivery(frame, sender, lane, epoch, number) for number, frame in numbered])
        if window.ack_due:
            self._send_ack(channel)
        return len(frames)

    def acknowledge(self, delivery: Delivery) -> None:
        channel = self._in_channels.get((delivery.sender, delivery.lane))
        if channel is None or not channel.window.acknowledge(delivery.epoch, delivery.number):
            return
        if not channel.ack_scheduled:
            channel.ack_scheduled = True
            if not self._channels_to_ack:
                self._loop.call_later(self._limits.ack_delay_s, self._send_scheduled_acks)
            self._channels_to_ack.append(channel)
        if channel.window.acknowledged - channel.acknowledged_below >= self._ack_every_frames:
            self._send_ack(channel)

    def _send_ack(self, channel: _InChannel) -> None:
        channel.acknowledged_below = channel.window.acknowledged
        if channel.send_ack is not None and not self._closed:
            channel.send_ack(channel.window.build_ack())

    def _send_scheduled_acks(self) -> None:
        channels, self._channels_to_ack = self._channels_to_ack, []
        for channel in channels:
            channel.ack_scheduled = False
            if channel.acknowledged_below != channel.window.acknowledged:
                self._send_ack(channel)

    # ---------------------------------------------------------------- restarts and departures

    def restore(self, sent: SendState, received: ReceiveState) -> None:
        if self._out_channels or self._in_channels:
            raise RuntimeError("restore the links before any frame is sent or received")
        for (process, lane), (epoch, expected) in received.items():
            self._in_channels[process, lane] = _InChannel(ReceiveWindow(self.epoch, epoch, expected))
        for (process, lane), (next_number, frames) in sent.items():
            channel = self._add_out_channel(process, lane)
            channel.window.restore(next_number, frames)
            if process in self._departed:
                self._count_dropped(process, channel.window.drop_buffered())
            elif frames:
                self._start_probing(channel)
                self._schedule_flush(channel)

    def drop_unacknowledged(self, process: str) -> int:
        channels = [channel for lane in LANES if (channel := self._out_channels.get((process, lane))) is not None]
        num_dropped = sum(channel.drop_buffered() for channel in channels)
        self.wire.disconnect(process)
        return num_dropped

    def forget_peer(self, process: str) -> None:
        """Drop the links and frames of a process that has ended. Another process of this name starts new links."""
        self.num_dropped += self.drop_unacknowledged(process)
        for lane in LANES:
            self._out_channels.pop((process, lane), None)
            self._in_channels.pop((process, lane), None)

    def drop_peer(self, process: str) -> None:
        """Drop all frames for and from a process that will not return."""
        if process not in self._departed:
            self._departed[process] = 0
            self._count_dropped(process, self.drop_unacknowledged(process))

    def _count_dropped(self, process: str, count: int = 1) -> None:
        self.num_dropped += count
        if count and not self._departed[process]:
            cause = "it has departed; further frames are dropped without a message"
            structlog.get_logger().warning("frames.dropped", peer=process, cause=cause)
        self._departed[process] += count

    @property
    def unacknowledged(self) -> Mapping[str, int]:
        by_peer: dict[str, int] = {}
        for channel in self._out_channels.values():
            if channel.window.num_buffered:
                by_peer[channel.process] = by_peer.get(channel.process, 0) + channel.window.num_buffered
        return by_peer

    @property
    def dropped(self) -> int:
        return self.num_dropped + sum(channel.window.num_dropped for channel in self._in_channels.values())

    # ---------------------------------------------------------------- closing

    async def close(self) -> None:
        if self._closed:
            return
        self._send_scheduled_acks()
        await self._wait_until_received()
        self._closed = True
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        for channel in self._out_channels.values():
            channel.window_open.set()
        await self.wire.close()

    async def _wait_until_received(self) -> None:
        """Wait up to half a second until the peers have received all frames."""
        deadline = self._loop.time() + _CLOSE_TIMEOUT_S
        self._flush_all()
        while late := [
            channel
            for channel in self._out_channels.values()
            if channel.window.received_below < channel.window.next_number
        ]:
            for channel in late:
                channel.send_probe(self.wire)
            self._ack_received.clear()
            try:
                await asyncio.wait_for(self._ack_received.wait(), deadline - self._loop.time())
            except TimeoutError:
                return
            await asyncio.sleep(_CLOSE_PROBE_INTERVAL_S)  # gives other peers time to answer
