"""The result of `asterism log fork` is written by `--json`, and shown as a table with the texts from the fork on."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asterism.actors.cli.console import make_table, print_line
from asterism.actors.replay.branch_runner import EndedTrajectory
from asterism.actors.replay.replay import ReplayedTrajectory
from asterism.analysis.trajectory_diff import TrajectoryComparison, TrajectoryOutcome, build_outcome, compare
from asterism.configs.run_folder import RunFolder
from asterism.policies.dialogue.chat_format import TextTokenizer
from asterism.policies.rollout.trajectory import Trajectory


class ForkPoint(NamedTuple):
    """The point from which the branches continue instead of the original."""

    original: ReplayedTrajectory
    turn: int
    start: Trajectory
    tool_result: str | None

    def list_versions(self) -> tuple[int, ...]:
        """Return the policy versions that generated the original from the turn on, in order."""
        record = self.original.final.record
        generated = np.frombuffer(record.loss_mask, np.uint8).astype(np.bool_)
        generated[: self.original.turn_starts[self.turn].record.num_tokens] = False
        return tuple(dict.fromkeys(np.frombuffer(record.versions, np.int32)[generated].tolist()))


class Branch(msgspec.Struct, frozen=True):
    outcome: TrajectoryOutcome
    comparison: TrajectoryComparison = msgspec.field(name="beside_original")


class ForkResult(msgspec.Struct, frozen=True):
    run: str
    trajectory: int
    turn: int
    problem: str
    ground_truth: str
    temperature: float
    checkpoint: str
    original_versions: tuple[int, ...]  # versions that generated the original's tokens from the turn on
    tool_result: str | None  # text that replaces the output of the last call
    original: TrajectoryOutcome
    branches: tuple[Branch, ...]


def build_fork_result(
    folder: RunFolder, point: ForkPoint, checkpoint: Path, tokenizer: TextTokenizer, ended: Sequence[EndedTrajectory]
) -> ForkResult:
    original, final, turn = point.original, point.original.final, point.turn
    position = original.turn_starts[turn].record.num_tokens
    return ForkResult(
        run=str(folder.path),
        trajectory=final.trajectory_id,
        turn=turn,
        problem=final.group.problem,
        ground_truth=final.group.ground_truth,
        temperature=final.group.sampling.temperature,
        checkpoint=str(checkpoint),
        original_versions=point.list_versions(),
        tool_result=point.tool_result,
        original=build_outcome(tokenizer, final, original.end),
        branches=tuple(
            Branch(
                build_outcome(tokenizer, each.trajectory, each.end),
                compare(final.record, each.trajectory.record, position),
            )
            for each in ended
        ),
    )


_RESULT_PATTERN = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_MAX_SHOWN_CHARACTERS = 160  # limit of a turn's text, and of the tool results before it


def show_fork(fork: ForkResult, console: Console) -> None:
    versions = ", ".join(map(str, fork.original_versions)) or "unknown"
    print_line(
        console,
        f"trajectory {fork.trajectory} of {fork.run}, {fork.problem}, truth {fork.ground_truth!r}: "
        f"from turn {fork.turn} with {fork.checkpoint} (original: version {versions})",
    )
    for remark in _list_remarks(fork):
        print_line(console, remark)
    console.print(_build_table(fork))
    _show_turns("original", fork.original, fork.turn, console)
    for number, branch in enumerate(fork.branches):
        if branch.comparison.same:
            print_line(console, _format_identical_branch(number, branch.comparison))
        else:
            _show_turns(f"branch {number}", branch.outcome, fork.turn, console)


def _list_remarks(fork: ForkResult) -> list[str]:
    remarks: list[str] = []
    if len(fork.original_versions) > 1:
        remarks.append("The original's weights changed during these turns; a branch uses one policy.")
    if fork.temperature == 0:
        remarks.append("Sampling is greedy (temperature 0): the seed has no effect.")
    return remarks


def _build_table(fork: ForkResult) -> Table:
    table = make_table("", ">reward", ">turns", ">calls", ">failed", ">tokens", "ending", "diverges at")
    table.add_row("original", *_format_cells(fork.original), "")
    for number, branch in enumerate(fork.branches):
        table.add_row(f"branch {number}", *_format_cells(branch.outcome), _format_divergence(branch.comparison))
    return table


def _format_cells(outcome: TrajectoryOutcome) -> list[str]:
    reward = "-" if outcome.reward is None else f"{outcome.reward:g}"
    counts = (outcome.turns, outcome.calls, outcome.calls_failed, outcome.response_tokens)
    return [reward, *map(str, counts), escape(outcome.ending)]


def _format_divergence(comparison: TrajectoryComparison) -> str:
    divergence = comparison.divergence
    if divergence is None:
        return "identical" if comparison.same else f"not in the {comparison.common_tokens} common tokens"
    where = f"turn {divergence.turn}" if divergence.within == "turn" else f"results before turn {divergence.turn}"
    return f"{where}, token {divergence.token}"


def _format_identical_branch(number: int, comparison: TrajectoryComparison) -> str:
    difference = comparison.logprob_difference_max
    logprobs = f"logprobs within {difference:.1g}" if difference else "same logprobs"
    return f"branch {number} is identical to the original: {comparison.common_tokens} tokens, {logprobs}"


def _show_turns(name: str, outcome: TrajectoryOutcome, first_turn: int, console: Console) -> None:
    seed = "" if name == "original" else f", seed {outcome.seed}"
    print_line(console, f"[bold]{name}[/]{seed}", markup=True)
    for turn in outcome.turn_texts[first_turn:]:
        if turn.given:
            results = " | ".join(_RESULT_PATTERN.findall(turn.given))
            print_line(console, f"          [dim]{_shorten(results)}[/]", markup=True)
        print_line(console, f"  turn {turn.turn}  {_shorten(turn.generated)}", markup=True)


def _shorten(text: str) -> str:
    """Join the lines, and omit the middle of a long text."""
    line = " ".join(text.split())
    return escape(
        line
        if len(line) <= _MAX_SHOWN_CHARACTERS
        else f"{line[: _MAX_SHOWN_CHARACTERS // 2]} ... {line[-_MAX_SHOWN_CHARACTERS // 2 :]}"
    )
