"""The flag --policies: a comma-separated list of names."""

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

P = TypeVar("P", bound=str)


def make_policies_parser(known: Sequence[P]) -> Callable[[str], tuple[P, ...]]:
    """Return an argparse type that rejects unknown names."""

    def read(names: str) -> tuple[P, ...]:
        chosen = names.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no policy {unknown[0]!r}; there are {', '.join(known)}")
        return tuple(next(each for each in known if each == name) for name in chosen)

    return read
