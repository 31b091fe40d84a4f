"""Notebooks: their completed cells, from which a lost or evicted process is rebuilt."""

import asyncio
from collections import OrderedDict

from sandbox.pool.fork_server_client import ForkServerClient
from sandbox.preloads import Preload

_EVICT_ONE_IN = 16  # under memory pressure, each check evicts one sixteenth of the live notebooks


class Notebook:
    """One trajectory's notebook.

    `completed_cells` are the cells (code, seed) that make up its state. The process has applied
    the first `num_applied_cells` of them: fewer than all after a cell has died, 0 without a
    process. The others run again before the next cell, without output to the model.
    """

    def __init__(self, number: int, preload: Preload) -> None:
        self.number = number
        self.preload: Preload = preload
        self.server: ForkServerClient | None = None  # holds the process; None: no process
        self.completed_cells: list[tuple[str, int]] = []
        self.num_applied_cells = 0
        self.lock = asyncio.Lock()  # cells run in the order of their requests
        self.ended = False
        # The notebook's own code destroyed its state, and it has not been rebuilt yet.
        self.destroyed_own_state = False

    @property
    def is_live(self) -> bool:
        return self.server is not None and self.server.alive


class NotebookTable:
    """Notebooks by trajectory, least recently used first; at most `max_live` have a process."""

    def __init__(self, max_live: int) -> None:
        self._max_live = max_live
        self._notebooks: OrderedDict[int, Notebook] = OrderedDict()
        self._last_number = 0

    def get_or_create(self, trajectory_id: int, preload: Preload) -> Notebook:
        notebook = self._notebooks.get(trajectory_id)
        if notebook is None:
            self._last_number += 1
            notebook = self._notebooks[trajectory_id] = Notebook(self._last_number, preload)
        self._notebooks.move_to_end(trajectory_id)
        return notebook

    def remove(self, trajectory_id: int) -> Notebook | None:
        return self._notebooks.pop(trajectory_id, None)

    def select_for_room(self) -> list[Notebook]:
        """A quarter of the idle notebooks, least recently used first: a process could not start."""
        idle = self._list_idle()
        return idle[: -(-len(idle) // 4)]

    def select_evictions(self, num_new: int, *, memory_pressure: bool) -> list[Notebook]:
        """The least recently used idle notebooks to evict for `num_new` more, or for memory."""
        if len(self._notebooks) + num_new <= self._max_live and not memory_pressure:
            return []
        num_live = sum(notebook.is_live for notebook in self._notebooks.values())
        excess = num_live + num_new - self._max_live
        if memory_pressure:
            excess = max(excess, -(-num_live // _EVICT_ONE_IN))
        return self._list_idle()[: max(0, excess)]

    def _list_idle(self) -> list[Notebook]:
        return [notebook for notebook in self._notebooks.values() if notebook.is_live and not notebook.lock.locked()]
