"""Transport between actors that share one process and one event loop."""

from __future__ import annotations

import asyncio

from bus.transport import Bus, Inbox


class Hub:
    """Where the members of one in-process bus find each other."""

    def __init__(self) -> None:
        self.inboxes: dict[str, Inbox] = {}
        self.changed = asyncio.Event()  # somebody joined, or an inbox has room again

    def join(self, process: str, queue_messages: int) -> Bus:
        if process in self.inboxes:
            raise ValueError(f"the address {process} is taken")
        inbox = self.inboxes[process] = Inbox(queue_messages)
        inbox.when_drained = self.changed.set
        self.changed.set()
        return Bus(process, inbox, InProcessTransport(self, process))


class InProcessTransport:
    def __init__(self, hub: Hub, process: str) -> None:
        self._hub = hub
        self._process = process

    async def send_frame(self, process: str, frame: bytes) -> None:
        """Waits until `process` has joined and its inbox has room."""
        while True:
            inbox = self._hub.inboxes.get(process)
            if inbox is not None and not inbox.full:
                inbox.put(frame)
                return
            self._hub.changed.clear()
            await self._hub.changed.wait()

    async def close(self) -> None:
        self._hub.inboxes.pop(self._process, None)
