"""What every table of the configuration is made of."""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the TOML file. A key that it does not know is an error."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message), which the loader prefixes with the table's path, unless `condition` holds."""
    if not condition:
        raise ValueError(message)
