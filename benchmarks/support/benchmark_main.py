"""Runs a benchmark program: reads its flags, measures, and prints the figures, as one JSON line last.

    if __name__ == "__main__":
        benchmark_main(__doc__, measure, Flag("--rounds", 5, quick=1), SEED, quick="one round")

Programs for a GPU import this module on machines without the project's packages: it needs only the standard library.
"""

import argparse
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

HIDDEN = argparse.SUPPRESS  # the help of a flag that only programs pass to their child processes

T = TypeVar("T")
Name = TypeVar("Name", bound=str)
Figures = Mapping[str, Any]


class FlagError(argparse.ArgumentTypeError):
    """A flag has an unusable value. `str(error)` names the remedy."""


class Flag(NamedTuple):
    """A flag, or a positional argument if `name` has no dashes. Its type is `kind`, or the type of `default`."""

    name: str
    default: Any = None
    text: str = ""
    quick: Any = None  # the default with --quick, if it differs from `default`
    kind: Callable[[str], Any] | None = None
    least: int | None = None
    choices: Sequence[str] | None = None
    metavar: str | None = None

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flag. A default `False` makes a switch, and a list makes a flag that can be repeated."""
        if self.default is False:
            parser.add_argument(self.name, action="store_true", help=self.text)
            return
        repeated = isinstance(self.default, list)
        kind = self.kind or (str if self.default is None or repeated else type(self.default))
        action = "append" if repeated else "store"
        rest: dict[str, Any] = {"choices": self.choices, "metavar": self.metavar, "help": self._describe()}
        parser.add_argument(self.name, type=kind, action=action, default=None, **rest)

    def _describe(self) -> str:
        if self.text is HIDDEN or self.default in (None, []):
            return self.text
        default = ",".join(self.default) if isinstance(self.default, tuple) else self.default
        return f"{self.text} ({default})".lstrip()

    def read(self, options: argparse.Namespace) -> Any:
        """Return the given value or the default. Raises FlagError if it is below `least`."""
        value = getattr(options, self.key)
        if value is None:
            value = self.quick if options.quick and self.quick is not None else self.default
        if self.least is not None and value < self.least:
            raise FlagError(f"{self.name} must be at least {self.least}: {value}")
        return value


SEED = Flag("--seed", 0)


class Options(argparse.Namespace):
    """The values of the flags by name. `scratch` is a temporary folder that exists until the program ends."""

    cleanup: ExitStack

    @cached_property
    def scratch(self) -> Path:
        return Path(self.cleanup.enter_context(tempfile.TemporaryDirectory()))


def choose_names(text: str | None, known: Sequence[Name], flag: str = "") -> tuple[Name, ...]:
    """Return the names of a comma-separated list, or all names without a list. Raises FlagError for unknown names."""
    chosen = list(known) if text is None else text.split(",")
    if unknown := set(chosen) - set(known):
        raise FlagError(f"{flag}unknown name {min(unknown)!r}; known: {', '.join(known)}")
    return tuple(known[known.index(name)] for name in chosen)


def make_policies_flag(default: tuple[str, ...], known: Sequence[str], quick: tuple[str, ...] | None = None) -> Flag:
    return Flag("--policies", default, quick=quick, kind=partial(choose_names, known=known), metavar="NAME,NAME")


def alternate(ways: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return the results of each way by round. The ways take turns, so that other load affects each of them."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, take in ways.items():
            found[name].append(take())
    return found


def compute_median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def show_figures(
    figures: Mapping[str, float],
    at_least: Mapping[str, float] | None = None,
    at_most: Mapping[str, float] | None = None,
) -> None:
    """Print a table of the figures and of their limits."""
    for name, value in figures.items():
        verdict = ""
        if (limit := (at_least or {}).get(name)) is not None:
            verdict = f"   at least {limit:g}{'' if value >= limit else ': MISSED'}"
        if (limit := (at_most or {}).get(name)) is not None:
            verdict = f"   at most {limit:g}{'' if value <= limit else ': MISSED'}"
        print(f"  {name:32}{value:14,.4g}{verdict}", flush=True)


def benchmark_main(
    doc: str | None,
    measure: Callable[[Options], Figures | None] | Callable[[Options], Coroutine[Any, Any, Figures]],
    *flags: Flag,
    quick: str,
    shows_table: bool = False,
    expected: tuple[type[Exception], ...] = (),
    has_passed: Callable[[Figures], bool] | None = None,
) -> None:
    """Run the program. `quick` is the help of --quick; explicit flags take precedence over it.

    An async `measure` runs on uvloop, as actors do. If `measure` returns None, no JSON line is printed. An exception of
    a type in `expected` ends the program with its text. The exit code is 1 if the figures have not passed.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    for flag in flags:
        flag.add_to(parser)
    with ExitStack() as cleanup:
        options = parser.parse_args(namespace=Options(cleanup=cleanup))
        try:
            for flag in flags:
                setattr(options, flag.key, flag.read(options))
            figures = _run(measure(options))
        except FlagError as error:
            parser.error(str(error))
        except expected as error:
            sys.exit(str(error))
    if figures is None:
        return
    if shows_table:
        show_figures(figures)
    print(json.dumps(figures))
    if has_passed is not None and not has_passed(figures):
        sys.exit(1)


def _run(measured: Figures | Coroutine[Any, Any, Figures] | None) -> Figures | None:
    if not inspect.iscoroutine(measured):
        return measured  # pyright: ignore[reportReturnType]
    import uvloop

    return uvloop.run(measured)
