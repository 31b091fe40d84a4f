"""The smallest environments: an instance is a number, and its only tool adds to the number.

The host process imports this module by its import path.
"""


class Counter:
    """A counter with methods that run on the event loop of the host process."""

    def __init__(self) -> None:
        self._total = 0

    async def reset(self) -> None:
        self._total = 0

    async def add(self, amount: int) -> str:
        """Add to the total.

        Args:
            amount: the number to add
        """
        self._total += amount
        return str(self._total)

    async def get_reward(self) -> float:
        return float(self._total)


class SyncCounter:
    """The same counter with sync methods; each call takes a thread."""

    def __init__(self) -> None:
        self._total = 0

    def reset(self) -> None:
        self._total = 0

    def add(self, amount: int) -> str:
        """Add to the total.

        Args:
            amount: the number to add
        """
        self._total += amount
        return str(self._total)

    def get_reward(self) -> float:
        return float(self._total)
