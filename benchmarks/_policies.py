"""The flag --policies: names with commas between them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

P = TypeVar("P", bound=str)


def some_of(known: Sequence[P]) -> Callable[[str], tuple[P, ...]]:
    """A type for argparse, which refuses any other name."""

    def read(names: str) -> tuple[P, ...]:
        chosen = names.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no policy {unknown[0]!r}; there are {', '.join(known)}")
        return tuple(next(each for each in known if each == name) for name in chosen)

    return read
