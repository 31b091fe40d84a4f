"""The parts of a plan: needs and limits of resources."""

import msgspec


class PlanItem(msgspec.Struct, frozen=True):
    """One use of a resource."""

    purpose: str
    bytes: float
    note: str = ""


class PlannedResource(msgspec.Struct, frozen=True):
    """A resource, such as the memory of one GPU. `available_bytes` is None if the machine is unknown."""

    name: str
    items: tuple[PlanItem, ...]
    available_bytes: float | None
    keys: tuple[str, ...] = ()  # configuration keys that change the need, the least costly change first
    remedy: str = ""  # a change of the machine

    @property
    def needed_bytes(self) -> float:
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes


class PlannedCount(msgspec.Struct, frozen=True):
    """A number that must not exceed a limit, such as GPUs of a node."""

    name: str
    needed: float
    limit: float | None
    keys: tuple[str, ...] = ()
    unit: str = ""
    remedy: str = ""

    @property
    def fits(self) -> bool:
        return self.limit is None or self.needed <= self.limit


class KeyChange(msgspec.Struct, frozen=True):
    """Values of configuration keys with which a resource suffices."""

    resource: str
    changes: dict[str, int | float | str]  # bool is an int

    def format(self) -> str:
        return ", ".join(
            f'{key} = "{value}"'
            if isinstance(value, str)
            else f"{key} = {str(value).lower()}"
            if isinstance(value, bool)
            else f"{key} = {value:g}"
            if isinstance(value, float)
            else f"{key} = {value}"
            for key, value in self.changes.items()
        )
