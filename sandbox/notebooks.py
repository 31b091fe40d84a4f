"""Notebooks: their completed cells, from which a lost or evicted process is rebuilt.

If memory or processes are short, the spare notebooks of the fork servers end first, then idle notebooks.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NoReturn

from asterism.sandbox.hosts.host import Host
from asterism.sandbox.pool.fork_server_client import ForkServerClient
from asterism.sandbox.pool.server_pool import ServerPool
from asterism.sandbox.preloads import Preload

_MEMORY_CHECK_S = 0.1
_EVICTION_S = 0.25  # time until the memory in use no longer contains the evicted notebooks
_SPARES_PAUSE_S = 10.0  # time without spare notebooks after the last shortage
_SPARES_END_S = 0.1  # time in which spare notebooks end


class Notebook:
    """One trajectory's notebook.

    `completed_cells` are the cells (code, seed) that make up its state. The process has applied the
    first `num_applied_cells` of these cells: none without a process, and not all after a crash. The
    remaining cells run again before the next cell, without output to the model.
    """

    def __init__(self, number: int, preload: Preload) -> None:
        self.number = number
        self.preload: Preload = preload
        self.server: ForkServerClient | None = None  # fork server of the notebook's process; None: no process
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
        """Select a quarter of the idle notebooks, least recently used first, after a process could not start."""
        idle = self.list_idle()
        return idle[: -(-len(idle) // 4)]

    def select_evictions(self, num_new: int) -> list[Notebook]:
        """Select the least recently used idle notebooks whose eviction makes room for `num_new` more."""
        if len(self._notebooks) + num_new <= self._max_live:
            return []
        num_live = sum(notebook.is_live for notebook in self._notebooks.values())
        return self.list_idle()[: max(0, num_live + num_new - self._max_live)]

    def select_largest(self, excess: int, sizes: Mapping[int, int]) -> list[Notebook]:
        """Select the largest idle notebooks that together hold `excess` bytes, at most a quarter of the idle ones."""
        idle = sorted(self.list_idle(), key=lambda notebook: -sizes.get(notebook.number, 0))
        selected: list[Notebook] = []
        for notebook in idle[: -(-len(idle) // 4)]:
            if excess <= 0:
                break
            selected.append(notebook)
            excess -= sizes.get(notebook.number, 0)
        return selected

    def list_idle(self) -> list[Notebook]:
        """Return the notebooks with a process and without a running cell, least recently used first."""
        return [notebook for notebook in self._notebooks.values() if notebook.is_live and not notebook.lock.locked()]


class SpareNotebooks:
    """The spare notebooks of all fork servers, at most `per_server` each."""

    def __init__(self, pools: Mapping[Preload, ServerPool], per_server: int) -> None:
        self._pools = pools
        self._per_server = per_server
        self._ending_until = self._paused_until = 0.0

    def end(self) -> bool:
        """End all spare notebooks, also those of new servers. Returns whether an eviction can still wait."""
        if not self._per_server:
            return False
        for pool in self._pools.values():
            pool.end_spare_notebooks(_SPARES_PAUSE_S)
        now = asyncio.get_running_loop().time()
        if now >= self._paused_until:
            self._ending_until = now + _SPARES_END_S
        self._paused_until = now + _SPARES_PAUSE_S
        return now < self._ending_until


class MemoryRelief:
    """Ends spare notebooks, then evicts the largest idle ones, while more than `share` of the memory is in use."""

    def __init__(
        self,
        host: Host,
        share: float,
        notebooks: NotebookTable,
        spares: SpareNotebooks,
        evict: Callable[[Notebook], None],
    ) -> None:
        self._host = host
        self._share = share
        self._notebooks = notebooks
        self._spares = spares
        self._evict = evict
        self._lock = asyncio.Lock()
        self._evicted_at = 0.0
        self._has_excess = False

    async def watch(self) -> NoReturn:
        while True:
            self._has_excess = self._host.get_excess_memory(self._share) > 0
            await self.make_room()
            await asyncio.sleep(_MEMORY_CHECK_S)

    async def make_room(self) -> None:
        """Free memory if `watch` found too much in use; concurrent callers wait for the same eviction."""
        if not self._has_excess:
            return
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now < self._evicted_at + _EVICTION_S:
                return
            if not self._spares.end():
                await self._evict_notebooks()
            self._evicted_at = asyncio.get_running_loop().time()

    async def _evict_notebooks(self) -> None:
        servers = {notebook.server for notebook in self._notebooks.list_idle() if notebook.server is not None}
        answers = await asyncio.gather(*[server.measure_notebooks() for server in servers])
        sizes = {number: size for answer in answers for number, size in answer.items()}
        for notebook in self._notebooks.select_largest(self._host.get_excess_memory(self._share), sizes):
            self._evict(notebook)
