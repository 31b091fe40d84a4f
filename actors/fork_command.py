"""`asterism log fork`: a logged trajectory goes on from one of its turns, otherwise or as it did, and is compared."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import uvloop
from msgspec.structs import replace
from rich.console import Console

from actors import json_file
from actors.fork_table import show_fork
from actors.forking import Ended, go_on
from actors.logged_history import end_heard, history_of
from actors.sandbox_commands import quiet
from actors.section_overrides import settings_of
from actors.wiring import EXECUTOR, rules
from analysis.summary import isolation_of
from bus.messages import TrajectoryFinished
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.snapshots import NAME
from engine.tokenizer import FastTokenizer, load_tokenizer
from policies.history import Course, History, branches, course_of, with_result
from policies.parting import Comparison, Outcome, compare, outcome_of
from policies.trajectory import Rules, Trajectory
from sandbox.choice import sandbox_of


class Options(NamedTuple):
    trajectory: int
    turn: int
    tool_result: Path | None
    checkpoint: Path | None
    seed: int | None
    num_branches: int
    overrides: list[str]  # of the engine and the sandbox
    json_file: Path | None


class Branch(msgspec.Struct, frozen=True):
    outcome: Outcome
    beside_original: Comparison


class Fork(msgspec.Struct, frozen=True):
    run: str
    trajectory: int
    turn: int
    problem: str
    ground_truth: str
    temperature: float
    checkpoint: str
    original_versions: tuple[int, ...]  # of its tokens from the turn on
    tool_result: str | None  # what the call printed instead
    original: Outcome
    branches: tuple[Branch, ...]


class _Point(NamedTuple):
    """Where the branches leave the original."""

    course: Course
    begins: Trajectory
    printed: str | None


def fork_trajectory(folder: RunFolder, options: Options, console: Console) -> int:
    """The exit code: 1 if infrastructure lost a branch. Raises UnusableInput, and SandboxFailure if there is no sandbox."""
    json_file.check_place(options.json_file)
    run = settings_of(folder, options.overrides, ("engine", "sandbox"))
    tokenizer = load_tokenizer(folder.expand(run.model.checkpoint))
    point = _point(folder, rules(run, tokenizer), tokenizer, options)
    versions = _versions(point.course, options.turn)
    checkpoint = _checkpoint(folder, options, versions)
    trajectories = branches(point.begins, options.num_branches, options.seed)
    quiet()
    ended = _run_on(run, folder, tokenizer, checkpoint, trajectories)
    fork = _compared(folder, options, point, versions, checkpoint, tokenizer, ended)
    show_fork(fork, console)
    json_file.write(options.json_file, fork)
    return int(any(branch.outcome.infrastructure_failed for branch in fork.branches))


# ---------------------------------------------------------------- where it begins


def _point(folder: RunFolder, run_rules: Rules, tokenizer: FastTokenizer, options: Options) -> _Point:
    history = history_of(folder, options.trajectory)
    course = _course(folder, run_rules, tokenizer, history)
    name = f"{folder.path}: trajectory {options.trajectory}"
    if not 0 <= options.turn < len(course.beginnings):
        begun = "turn 0 alone" if len(course.beginnings) == 1 else f"turns 0 to {len(course.beginnings) - 1}"
        raise UnusableInput(f"--turn {options.turn}: {name} began {begun}")
    begins = course.beginnings[options.turn]
    if options.tool_result is None:
        return _Point(course, begins, None)
    printed = _text_of(options.tool_result)
    if options.turn == 0:
        raise UnusableInput(f"--tool-result {options.tool_result}: no tool speaks before turn 0; take a later --turn")
    changed = _with_result(run_rules, tokenizer, history, options, printed)
    return _Point(course, replace(changed, cells=begins.cells), printed)  # the notebook holds what really ran


def _course(folder: RunFolder, run_rules: Rules, tokenizer: FastTokenizer, history: History) -> Course:
    """With the end that the head heard of. Raises UnusableInput where the log comes to other tokens than it came to then:
    results are logged as they came, and become tokens by the program's present code."""
    course = course_of(run_rules, tokenizer, history)
    end = end_heard(folder, history)
    if isinstance(end, TrajectoryFinished) and not end.token_ids.startswith(course.last.record.token_ids):
        raise UnusableInput(
            f"{folder.events}: trajectory {history.trajectory_id} comes to other tokens now than in the run: "
            "was its config.toml, its tokenizer or the program changed?"
        )
    return course._replace(end=end or course.end)


def _with_result(
    run_rules: Rules, tokenizer: FastTokenizer, history: History, options: Options, printed: str
) -> Trajectory:
    flag = f"--tool-result {options.tool_result}"
    try:
        course = course_of(run_rules, tokenizer, with_result(run_rules, tokenizer, history, options.turn, printed))
    except LookupError as error:
        raise UnusableInput(f"{flag}: {error} whose result could be another") from None
    if len(course.beginnings) <= options.turn:
        left = run_rules.response_tokens
        raise UnusableInput(
            f"{flag}: with this result the {left} tokens of a response are spent before turn {options.turn}"
        )
    return course.beginnings[options.turn]


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableInput(f"--tool-result {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UnusableInput(f"--tool-result {file}: is not UTF-8 text (byte {error.start})") from None


# ---------------------------------------------------------------- who generates


def _versions(course: Course, turn: int) -> tuple[int, ...]:
    """Of the policies that generated the original from the turn on, in their order."""
    record = course.last.record
    generated = np.frombuffer(record.loss_mask, np.uint8).astype(np.bool_)
    generated[: course.beginnings[turn].record.num_tokens] = False
    return tuple(dict.fromkeys(np.frombuffer(record.versions, np.int32)[generated].tolist()))


def _checkpoint(folder: RunFolder, options: Options, versions: tuple[int, ...]) -> Path:
    if options.checkpoint is not None:
        if not options.checkpoint.is_dir():
            raise UnusableInput(f"--checkpoint {options.checkpoint}: there is no such folder")
        return options.checkpoint
    there = sorted(path.name for path in folder.checkpoints.glob("step_*") if NAME.fullmatch(path.name))
    kept = f"{folder.checkpoints} holds {', '.join(there) or 'none'}"
    if not versions:
        raise UnusableInput(
            f"no token of turn {options.turn} of trajectory {options.trajectory} is logged, so that its policy is unknown: "
            f"name one with --checkpoint; {kept}"
        )
    checkpoint = folder.checkpoint(versions[0])
    if not checkpoint.is_dir():
        raise UnusableInput(
            f"{checkpoint}: policy version {versions[0]}, which generated turn {options.turn} of trajectory "
            f"{options.trajectory}, is not kept; {kept}: name one with --checkpoint"
        )
    return checkpoint


def _check_vocabulary(checkpoint: Path, tokenizer: FastTokenizer) -> None:
    """The log is in ids. Raises UnusableInput for a model that gives them another meaning, or none."""
    from engine.checkpoint import load_config  # torch: when there is something to run
    from engine.tokenizer import check_vocabulary

    check_vocabulary(load_config(checkpoint), tokenizer)
    if (checkpoint / "tokenizer.json").exists():
        load_tokenizer(checkpoint).check_same_vocabulary(tokenizer)


def _run_on(
    run: Run, folder: RunFolder, tokenizer: FastTokenizer, checkpoint: Path, trajectories: list[Trajectory]
) -> list[Ended]:
    from actors.embedded_engine import embedded_engine

    _check_vocabulary(checkpoint, tokenizer)
    pages = -(-run.dialogue.sequence_tokens // run.engine.page_tokens)
    needed = len(trajectories) * pages * run.engine.page_tokens
    engine = embedded_engine(run, checkpoint, kv_tokens=min(run.engine.kv_tokens, needed))
    config = run.sandbox
    if config.backend == "auto" and (before := isolation_of(folder, EXECUTOR)) is not None:
        config = replace(config, backend=before["backend"])
    sandbox = sandbox_of(config, run.seed, f"{run.name}-fork")
    try:
        strict = run.determinism == "strict"
        return uvloop.run(go_on(rules(run, tokenizer), tokenizer, engine, sandbox, trajectories, strict=strict))
    except ExceptionGroup as group:  # of the one that could not start; the others were cancelled
        raise group.exceptions[0] from group


# ---------------------------------------------------------------- what comes of it


def _compared(
    folder: RunFolder,
    options: Options,
    point: _Point,
    versions: tuple[int, ...],
    checkpoint: Path,
    tokenizer: FastTokenizer,
    ended: list[Ended],
) -> Fork:
    course, group = point.course, point.course.last.group
    position = course.beginnings[options.turn].record.num_tokens
    return Fork(
        run=str(folder.path),
        trajectory=options.trajectory,
        turn=options.turn,
        problem=group.problem,
        ground_truth=group.ground_truth,
        temperature=group.temperature,
        checkpoint=str(checkpoint),
        original_versions=versions,
        tool_result=point.printed,
        original=outcome_of(tokenizer, course.last, course.end),
        branches=tuple(
            Branch(
                outcome_of(tokenizer, each.trajectory, each.end),
                compare(course.last.record, each.trajectory.record, position),
            )
            for each in ended
        ),
    )
