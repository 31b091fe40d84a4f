"""What a notebook is beyond its process: its cells so far, from which the process can be made again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from sandbox.flavours import Flavour
from sandbox.pool import ForkServerLink

_SHARE_PRESSED = 16  # where memory is short, one in so many idle notebooks loses its process at a time


class Session:
    """One trajectory's notebook. `done` are the cells whose effects its state holds, with their seeds.

    `held` is how many of them the state of its process holds now: fewer than all after some cell has died, and none
    when there is no process. The others are run again before the next cell, unseen by the model.
    """

    def __init__(self, number: int, flavour: Flavour) -> None:
        self.number = number
        self.flavour: Flavour = flavour
        self.server: ForkServerLink | None = None  # which holds the process; None when there is none
        self.done: list[tuple[str, int]] = []
        self.held = 0
        self.turn = asyncio.Lock()  # cells run in the order in which they were asked for
        self.ended = False
        self.ended_itself = False  # what its code did has cost it its state, and it has not been made again since

    @property
    def live(self) -> bool:
        return self.server is not None and self.server.alive


class Sessions:
    """By trajectory, least recently used first. At most `live` of them have a process."""

    def __init__(self, live: int) -> None:
        self._live = live
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._numbers = 0

    def of(self, trajectory_id: int, flavour: Flavour) -> Session:
        session = self._sessions.get(trajectory_id)
        if session is None:
            self._numbers += 1
            session = self._sessions[trajectory_id] = Session(self._numbers, flavour)
        self._sessions.move_to_end(trajectory_id)
        return session

    def remove(self, trajectory_id: int) -> Session | None:
        return self._sessions.pop(trajectory_id, None)

    def to_evict(self, new: int, *, pressed: bool) -> list[Session]:
        """Those whose processes are to end so that `new` more may be made: idle, and used longest ago.

        `pressed`: memory is short, so that some end also if there are few.
        """
        if len(self._sessions) + new <= self._live and not pressed:
            return []
        live = [session for session in self._sessions.values() if session.live]
        excess = len(live) + new - self._live
        if pressed:
            excess = max(excess, -(-len(live) // _SHARE_PRESSED))
        idle = [session for session in live if not session.turn.locked()]
        return idle[: max(0, excess)]
