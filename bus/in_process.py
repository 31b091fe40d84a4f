"""Transport between actors that share one process and one event loop. Nothing is lost but with who leaves."""

from __future__ import annotations

import asyncio
from functools import partial

from bus.lanes import LANES, Lane
from bus.links import Limits, Links
from bus.parcels import Ack, Parcel
from bus.transport import Bus, Inbox


class Hub:
    """Where the members of one in-process bus find each other."""

    def __init__(self) -> None:
        self.members: dict[str, Links] = {}
        self.refused: set[tuple[str, str, Lane]] = set()  # who waits to carry on to whom

    def join(self, process: str, queue_messages: int, session: int = 0) -> Bus:
        if process in self.members:
            raise ValueError(f"the address {process} is taken")
        inbox = Inbox(queue_messages)
        links = Links(process, session, inbox, Limits(queue_messages, acknowledge_after_s=0.0, ask_after_s=None))
        links.wire = InProcessWire(self, links)
        inbox.when_drained = partial(self._carry_on, process)
        self.members[process] = links
        asyncio.get_running_loop().call_soon(self._welcome, process)
        return Bus(process, inbox, links)

    def _welcome(self, process: str) -> None:
        """It may be another one than before."""
        for lane in LANES:
            self._carry_on(process, lane)
        for member in self.members.values():
            member.ask(process)

    def _carry_on(self, process: str, lane: Lane) -> None:
        """There is room for what waits to be carried there."""
        for refused in [one for one in self.refused if one[1:] == (process, lane)]:
            self.refused.discard(refused)
            if refused[0] in self.members:
                asyncio.get_running_loop().call_soon(self.members[refused[0]].carry_on, process, lane)


class InProcessWire:
    """Implements bus.links.Wire."""

    def __init__(self, hub: Hub, links: Links) -> None:
        self._hub = hub
        self._links = links

    def carry(self, process: str, lane: Lane, parcel: Parcel) -> bool:
        member = self._hub.members.get(process)
        if member is None or member.inbox.full(lane):
            self._hub.refused.add((self._links.process, process, lane))
            return False
        member.arrived(lane, parcel, partial(self._answer, process, lane))
        return True

    def _answer(self, process: str, lane: Lane, ack: Ack) -> None:
        asyncio.get_running_loop().call_soon(self._links.hear, process, lane, ack)

    def part(self, process: str) -> None:
        pass

    async def close(self) -> None:
        self._hub.members.pop(self._links.process, None)
