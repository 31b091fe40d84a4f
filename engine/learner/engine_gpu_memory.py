"""The learner's side of the handover of GPU memory, if learner and engines share GPUs (asterism.policies.recipe).

The learner requests the memory of the engines before it loads its model and before each step, and waits until all
engines have released their memory. The next published weights end the handover:

    learner --> GpuMemoryRequested --> recipe
    recipe  --> GpuMemoryGranted   --> learner, which trains
    learner --> WeightsPublished   --> recipe, which sends the weights to the engines

A restarted learner sends a new request; it ignores a grant for its earlier incarnation.
"""

import asyncio

from asterism.bus.addresses import RECIPE
from asterism.bus.bus import Bus
from asterism.bus.messages import GpuMemoryGranted, GpuMemoryRequested


class EngineGpuMemory:
    """The engines' GPU memory, which the learner uses from `acquire` to `release`. If not shared, calls do nothing."""

    def __init__(self, bus: Bus, incarnation: int, *, is_shared: bool) -> None:
        """`incarnation`: the number of the learner's start."""
        self._bus, self._incarnation, self._is_shared = bus, incarnation, is_shared
        self._requested_version: int | None = None  # version of the current request
        self._granted = asyncio.Event()

    async def acquire(self, version: int) -> None:
        """Wait until all engines have freed their memory. `version`: version of the next weights, or -1."""
        if not self._is_shared or self._requested_version is not None:
            return
        self._requested_version = version
        self._granted.clear()
        await self._bus.send(RECIPE, GpuMemoryRequested(self._incarnation, version))
        await self._granted.wait()

    def on_granted(self, granted: GpuMemoryGranted) -> None:
        """End the wait in `acquire`. Grants for requests of an earlier incarnation are ignored."""
        if (granted.learner_incarnation, granted.version) == (self._incarnation, self._requested_version):
            self._granted.set()

    def release(self) -> None:
        """End the handover. The learner's next message, the published weights, wakes the engines."""
        self._requested_version = None
