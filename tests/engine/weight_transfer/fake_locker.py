"""Records which memory is locked, instead of a GPU's driver."""


class FakePageLocker:
    def __init__(self, *, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.locked: dict[int, int] = {}  # bytes by address
        self._refuses = refuses

    def register(self, address: int, num_bytes: int) -> bool:
        assert address not in self.locked
        self.calls.append("register")
        if not self._refuses:
            self.locked[address] = num_bytes
        return not self._refuses

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")
        del self.locked[address]
