"""Calls for the load on a sandbox: numbered programs, cells of notebooks, and misbehaving programs."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from asterism.bus.messages import CodeOk, CodeOutcome, CodeOutOfMemory, CodeRequested, CodeTimedOut
from asterism.sandbox.load_test import PRINT, Probe, expect_stdout, make_program_probe, make_program_probes

CELL = "cell"
# This cell is not pure (asterism.sandbox.inside.call.pure_cells), so a fork keeps the state before the cell.
FORKED_CELL = "forked_cell"
_CELLS = {CELL: ("1+1", "2\n"), FORKED_CELL: ("import math\nmath.gcd(12, 18)", "6\n")}  # code, output


def _is_megabyte(outcome: CodeOutcome) -> bool:
    return isinstance(outcome, CodeOk) and len(outcome.output.stdout) + outcome.output.stdout_cut == 1_000_001


# kind, share of all calls, code, check
_MISBEHAVING: tuple[tuple[str, float, str, Callable[[CodeOutcome], bool]], ...] = (
    ("loop", 0.02, "while True: pass", lambda outcome: isinstance(outcome, CodeTimedOut)),
    (
        "hog",
        0.02,
        "blocks = []\nwhile True: blocks.append(bytearray(b'x') * (1 << 20))",
        # The expected outcome depends on the limit that the program reaches first.
        lambda outcome: isinstance(outcome, CodeOutOfMemory | CodeTimedOut),
    ),
    ("megabyte", 0.01, "print('x' * 1_000_000)", _is_megabyte),
)


def make_numbered_probes(trajectories: Iterable[int]) -> Iterator[Probe]:
    """Make programs that print their numbers. An answer that belongs to another call is therefore wrong."""
    for trajectory in trajectories:
        yield make_program_probe(PRINT, trajectory, f"print({trajectory})", expect_stdout(f"{trajectory}\n"))


def make_cell_probes(kind: str, notebooks: Sequence[int], calls: Iterable[int]) -> Iterator[Probe]:
    """Make cells of notebooks, in rounds over all notebooks."""
    code, printed = _CELLS[kind]
    for call in calls:
        for notebook in notebooks:
            yield Probe(kind, CodeRequested(notebook, call, "jupyter_code", code, ""), expect_stdout(printed))


def make_mixed_probes(healthy: int, seed: int = 0) -> list[Probe]:
    """Make `healthy` prints, mixed at random with 2% endless loops, 2% memory hogs and 1% outputs of a megabyte."""
    total = round(healthy / 0.95)
    probes = list(make_program_probes(PRINT, range(healthy)))
    for kind, share, code, accepts in _MISBEHAVING:
        for trajectory in range(len(probes), len(probes) + round(total * share)):
            probes.append(make_program_probe(kind, trajectory, code, accepts))
    random.Random(seed).shuffle(probes)
    return probes
