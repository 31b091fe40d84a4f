"""What `asterism log fork` prints: the original and its branches in a table, then what each says from the turn on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from policies.parting import Comparison, Outcome

if TYPE_CHECKING:
    from actors.fork_command import Fork

_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_SHOWN = 160  # characters of a turn's text, and of what was given before it


def show_fork(fork: Fork, console: Console) -> None:
    versions = ", ".join(map(str, fork.original_versions)) or "unknown"
    console.print(
        f"trajectory {fork.trajectory} of {fork.run}, {fork.problem}, truth {fork.ground_truth!r}: "
        f"from turn {fork.turn} on, by {fork.checkpoint} (the original: by version {versions})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for remark in _remarks(fork):
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(fork))
    _show_turns("original", fork.original, fork.turn, console)
    for number, branch in enumerate(fork.branches):
        if branch.beside_original.same:
            console.print(_same_again(number, branch.beside_original), highlight=False, soft_wrap=True)
        else:
            _show_turns(f"branch {number}", branch.outcome, fork.turn, console)


def _remarks(fork: Fork) -> list[str]:
    remarks: list[str] = []
    if len(fork.original_versions) > 1:
        remarks.append("The original's weights changed on the way; a branch has one policy from its turn to its end.")
    if fork.temperature == 0:
        remarks.append("It is greedy (temperature 0): no seed changes its tokens.")
    return remarks


def _table(fork: Fork) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in ("reward", "turns", "calls", "failed", "tokens"):
        table.add_column(title, justify="right")
    table.add_column("ending")
    table.add_column("parts at")
    table.add_row("original", *_cells(fork.original), "")
    for number, branch in enumerate(fork.branches):
        table.add_row(f"branch {number}", *_cells(branch.outcome), _parts(branch.beside_original))
    return table


def _cells(outcome: Outcome) -> list[str]:
    reward = "-" if outcome.reward is None else f"{outcome.reward:g}"
    counts = (outcome.turns, outcome.calls, outcome.calls_failed, outcome.response_tokens)
    return [reward, *map(str, counts), escape(outcome.ending)]


def _parts(comparison: Comparison) -> str:
    parting = comparison.parting
    if parting is None:
        return "nowhere" if comparison.same else f"not in the {comparison.common_tokens} that both have"
    where = f"turn {parting.turn}" if parting.within == "turn" else f"results before turn {parting.turn}"
    return f"{where}, token {parting.token}"


def _same_again(number: int, comparison: Comparison) -> str:
    strayed = comparison.logprob_difference_max
    logprobs = f", their logprobs within {strayed:.1g}" if strayed else " and so are their logprobs"
    return f"branch {number} is the original again: all {comparison.common_tokens} tokens are the same{logprobs}"


def _show_turns(name: str, outcome: Outcome, first: int, console: Console) -> None:
    seed = "" if name == "original" else f", seed {outcome.seed}"
    console.print(f"[bold]{name}[/]{seed}", highlight=False)
    for turn in outcome.told[first:]:
        if turn.given:
            results = " | ".join(_RESULT.findall(turn.given))
            console.print(f"          [dim]{_brief(results)}[/]", highlight=False, soft_wrap=True)
        console.print(f"  turn {turn.turn}  {_brief(turn.said)}", highlight=False, soft_wrap=True)


def _brief(text: str) -> str:
    """On one line, its middle left out where it is long."""
    line = " ".join(text.split())
    return escape(line if len(line) <= _SHOWN else f"{line[: _SHOWN // 2]} ... {line[-_SHOWN // 2 :]}")
