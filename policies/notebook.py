"""What a notebook is made of: the cells whose effects its state holds, so that it can be made again elsewhere."""

from __future__ import annotations

from bus.messages import CodeFinished, CodeOk, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeRequested


def keeps_effects(outcome: CodeOutcome) -> bool:
    """After a cell that times out, dies or is refused, the notebook goes on from the state before it."""
    return isinstance(outcome, CodeOk | CodeRaised | CodeOutOfMemory)


def with_cell(
    cells: tuple[CodeRequested, ...], call: CodeRequested, finished: CodeFinished
) -> tuple[CodeRequested, ...]:
    if call.tool == "jupyter_code" and keeps_effects(finished.outcome):
        return (*cells, call)
    return cells
