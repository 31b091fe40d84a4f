"""If memory or processes are short, spare notebooks end first, and then notebooks of trajectories."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

from asterism.sandbox.notebooks import MemoryRelief, Notebook, NotebookTable, SpareNotebooks
from asterism.sandbox.pool.fork_server_client import ForkServerClient

EXCESS_BYTES = 1000
MAX_PAUSE_S = 10.0  # longest pause without spare notebooks after a shortage


class MeasuringServer:
    alive = True

    async def measure_notebooks(self) -> dict[int, int]:
        return dict.fromkeys(range(1, 5), EXCESS_BYTES)


class Machine:
    """A machine with four idle notebooks. Too much memory is in use until `ended` has `needed` entries."""

    def __init__(self, needed: int, spares_per_server: int = 8) -> None:
        self.ended: list[str] = []
        self._needed = needed
        self._notebooks = NotebookTable(max_live=512)
        for trajectory in range(4):
            self._notebooks.get_or_create(trajectory, "bare").server = cast(ForkServerClient, MeasuringServer())
        pool: Any = SimpleNamespace(end_spare_notebooks=self._end_spares)
        self.spares = SpareNotebooks({"bare": pool}, spares_per_server)

    def get_excess_memory(self, share: float) -> int:
        return EXCESS_BYTES if len(self.ended) < self._needed else -EXCESS_BYTES

    def _end_spares(self, pause_s: float) -> None:
        assert pause_s == MAX_PAUSE_S
        if "spare" not in self.ended:
            self.ended.append("spare")

    def _evict(self, notebook: Notebook) -> None:
        self.ended.append(f"notebook {notebook.number}")
        notebook.server = None

    async def relieve(self) -> list[str]:
        host: Any = self
        relief = MemoryRelief(host, 0.8, self._notebooks, self.spares, self._evict)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(relief.watch(), 5.0)
        return self.ended


async def test_spare_notebooks_end_before_a_notebook_is_evicted() -> None:
    assert await Machine(needed=3).relieve() == ["spare", "notebook 1", "notebook 2"]


async def test_no_notebook_is_evicted_if_spare_notebooks_free_enough_memory() -> None:
    assert await Machine(needed=1).relieve() == ["spare"]


async def test_without_spare_notebooks_a_notebook_is_evicted_immediately() -> None:
    assert await Machine(needed=1, spares_per_server=0).relieve() == ["notebook 1"]


async def test_an_eviction_waits_only_while_the_spare_notebooks_end() -> None:
    machine = Machine(needed=1)
    assert [machine.spares.end(), machine.spares.end()] == [True, True]  # two calls fail at the same time
    await asyncio.sleep(0.1)
    assert not machine.spares.end()
    await asyncio.sleep(MAX_PAUSE_S - 0.1)
    assert not machine.spares.end()  # the shortage continues, and the spare notebooks have not returned
    await asyncio.sleep(MAX_PAUSE_S)
    assert machine.spares.end()
