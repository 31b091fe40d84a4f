"""The learner's side of the handover of GPU memory, if learner and engines share GPUs (asterism.policies.recipe).

The learner requests the memory of the engines before it loads its model and before each step, and
waits until all engines have released it. The weights that it publishes next end the handover:

    learner --> GpuMemoryRequested --> recipe
    recipe  --> GpuMemoryGranted   --> learner, which trains
    learner --> WeightsPublished   --> recipe, which sends them to the engines

A restarted learner requests again; a grant for its earlier incarnation is ignored.
"""

import asyncio

from asterism.bus.addresses import RECIPE
from asterism.bus.bus import Bus
from asterism.bus.messages import GpuMemoryGranted, GpuMemoryRequested


class EngineGpuMemory:
    """The memory that the engines lend, from `acquire` to `release`. Does nothing unless `is_shared`."""

    def __init__(self, bus: Bus, incarnation: int, *, is_shared: bool) -> None:
        """`incarnation` counts the learner's starts."""
        self._bus, self._incarnation, self._is_shared = bus, incarnation, is_shared
        self._requested_version: int | None = None  # of the current loan
        self._granted = asyncio.Event()

    async def acquire(self, version: int) -> None:
        """Wait until all engines have freed their memory. `version`: of the next weights, or -1."""
        if not self._is_shared or self._requested_version is not None:
            return
        self._requested_version = version
        self._granted.clear()
        await self._bus.send(RECIPE, GpuMemoryRequested(self._incarnation, version))
        await self._granted.wait()

    def on_granted(self, granted: GpuMemoryGranted) -> None:
        """Ignores grants of requests by an earlier incarnation."""
        if (granted.learner_incarnation, granted.version) == (self._incarnation, self._requested_version):
            self._granted.set()

    def release(self) -> None:
        """The weights that the learner sends next wake the engines."""
        self._requested_version = None
