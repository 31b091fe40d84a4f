"""`asterism log fork`: continues a logged trajectory from one of its turns."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import uvloop
from msgspec.structs import replace
from rich.console import Console

from actors.cli.json_output import check_json_path, write_json
from actors.cli.log.fork_result import ForkPoint, build_fork_result
from actors.cli.log.fork_table import show_fork
from actors.cli.sandbox_commands import suppress_logs
from actors.replay.branch_runner import EndedTrajectory, continue_trajectories
from actors.replay.logged_history import read_end_at_head, read_history
from actors.runtime.wiring import build_rules
from analysis.summary import read_isolation
from analysis.what_if.trajectory_replay import (
    ReplayedTrajectory,
    TrajectoryHistory,
    fork_trajectories,
    replace_call_result,
    replay_trajectory,
)
from bus.addresses import EXECUTOR
from bus.messages import TrajectoryFinished
from configs.errors import UnusableInput
from configs.load import load_with_overrides
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.learner.checkpoints import CHECKPOINT_NAME
from engine.model.tokenizer import FastTokenizer, load_tokenizer
from policies.rollout.trajectory import Rules, Trajectory
from sandbox.select_backend import make_sandbox


class ForkOptions(NamedTuple):
    trajectory: int
    turn: int
    tool_result: Path | None
    checkpoint: Path | None
    seed: int | None
    num_branches: int
    overrides: list[str]  # KEY=VALUE, of the engine and the sandbox
    json_file: Path | None


def fork_trajectory(folder: RunFolder, options: ForkOptions, console: Console) -> int:
    """Returns the exit code: 1 if the infrastructure lost a branch.

    Raises UnusableInput, and SandboxFailure if no sandbox is available.
    """
    check_json_path(options.json_file)
    run = load_with_overrides(folder.config, options.overrides, ("engine", "sandbox"))
    tokenizer = load_tokenizer(folder.expand_path(run.model.checkpoint))
    point = _find_fork_point(folder, build_rules(run, tokenizer), tokenizer, options)
    checkpoint = _choose_checkpoint(folder, options, point.list_versions())
    trajectories = fork_trajectories(point.start, options.num_branches, options.seed)
    suppress_logs()
    ended = _run_branches(run, folder, tokenizer, checkpoint, trajectories)
    fork = build_fork_result(folder, point, checkpoint, tokenizer, ended)
    show_fork(fork, console)
    write_json(options.json_file, fork)
    return int(any(branch.outcome.infrastructure_failed for branch in fork.branches))


# ---------------------------------------------------------------- fork point


def _find_fork_point(folder: RunFolder, run_rules: Rules, tokenizer: FastTokenizer, options: ForkOptions) -> ForkPoint:
    history = read_history(folder, options.trajectory)
    original = _replay_original(folder, run_rules, tokenizer, history)
    name = f"{folder.path}: trajectory {options.trajectory}"
    if not 0 <= options.turn < len(original.turn_starts):
        turns = "only turn 0" if len(original.turn_starts) == 1 else f"turns 0 to {len(original.turn_starts) - 1}"
        raise UnusableInput(f"--turn {options.turn}: {name} has {turns}")
    turn_start = original.turn_starts[options.turn]
    if options.tool_result is None:
        return ForkPoint(original, options.turn, turn_start, None)
    stdout = _read_result_file(options.tool_result)
    if options.turn == 0:
        raise UnusableInput(f"--tool-result {options.tool_result}: turn 0 follows no tool call; use a later --turn")
    changed = _apply_tool_result(run_rules, tokenizer, history, options, stdout)
    # The branches' notebook is rebuilt from the cells that the original ran.
    return ForkPoint(original, options.turn, replace(changed, cells=turn_start.cells), stdout)


def _replay_original(
    folder: RunFolder, run_rules: Rules, tokenizer: FastTokenizer, history: TrajectoryHistory
) -> ReplayedTrajectory:
    """The replayed trajectory, with the end that the head logged.

    Raises UnusableInput if the tokens differ from the run's: the log holds tool results as text,
    which the current code tokenizes again.
    """
    replayed = replay_trajectory(run_rules, tokenizer, history)
    end = read_end_at_head(folder, history)
    if isinstance(end, TrajectoryFinished) and not end.token_ids.startswith(replayed.final.record.token_ids):
        raise UnusableInput(
            f"{folder.events}: trajectory {history.trajectory_id} replays to other tokens than in the run: "
            "its config.toml, its tokenizer or the program has changed since"
        )
    return replayed._replace(end=end or replayed.end)


def _apply_tool_result(
    run_rules: Rules, tokenizer: FastTokenizer, history: TrajectoryHistory, options: ForkOptions, stdout: str
) -> Trajectory:
    flag = f"--tool-result {options.tool_result}"
    try:
        changed = replace_call_result(run_rules, tokenizer, history, options.turn, stdout)
    except LookupError as error:
        raise UnusableInput(f"{flag}: {error}, so there is no result to replace") from None
    replayed = replay_trajectory(run_rules, tokenizer, changed)
    if len(replayed.turn_starts) <= options.turn:
        raise UnusableInput(
            f"{flag}: too long: it exhausts the response's {run_rules.response_tokens} tokens before turn {options.turn}"
        )
    return replayed.turn_starts[options.turn]


def _read_result_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableInput(f"--tool-result {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UnusableInput(f"--tool-result {file}: is not UTF-8 text (byte {error.start})") from None


# ---------------------------------------------------------------- branches


def _choose_checkpoint(folder: RunFolder, options: ForkOptions, versions: tuple[int, ...]) -> Path:
    if options.checkpoint is not None:
        if not options.checkpoint.is_dir():
            raise UnusableInput(f"--checkpoint {options.checkpoint}: no such folder")
        return options.checkpoint
    existing = sorted(path.name for path in folder.checkpoints.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name))
    remedy = f"name a checkpoint with --checkpoint; {folder.checkpoints} has {', '.join(existing) or 'none'}"
    if not versions:
        raise UnusableInput(
            f"trajectory {options.trajectory} has no logged token of turn {options.turn}, so its policy is unknown: {remedy}"
        )
    checkpoint = folder.get_checkpoint_path(versions[0])
    if not checkpoint.is_dir():
        raise UnusableInput(
            f"{checkpoint}: the run has not kept policy version {versions[0]}, which generated turn {options.turn} of "
            f"trajectory {options.trajectory}: {remedy}"
        )
    return checkpoint


def _check_vocabulary(checkpoint: Path, tokenizer: FastTokenizer) -> None:
    """Raises UnusableInput if the model's vocabulary differs: the log holds token ids."""
    from engine.model.hf_checkpoint import load_model_config  # torch is slow to import
    from engine.model.tokenizer import check_vocabulary

    check_vocabulary(load_model_config(checkpoint), tokenizer)
    if (checkpoint / "tokenizer.json").exists():
        load_tokenizer(checkpoint).check_same_vocabulary(tokenizer)


def _run_branches(
    run: RunConfig, folder: RunFolder, tokenizer: FastTokenizer, checkpoint: Path, trajectories: list[Trajectory]
) -> list[EndedTrajectory]:
    from actors.engines.embedded_factory import build_embedded_engine

    _check_vocabulary(checkpoint, tokenizer)
    pages = -(-run.dialogue.sequence_tokens // run.engine.page_tokens)
    needed = len(trajectories) * pages * run.engine.page_tokens
    engine = build_embedded_engine(run, checkpoint, kv_tokens=min(run.engine.kv_tokens, needed))
    config = run.sandbox
    if config.backend == "auto" and (before := read_isolation(folder, EXECUTOR)) is not None:
        config = replace(config, backend=before["backend"])
    sandbox = make_sandbox(config, run.seed, f"{run.name}-fork")
    try:
        strict = run.determinism == "strict"
        return uvloop.run(
            continue_trajectories(build_rules(run, tokenizer), tokenizer, engine, sandbox, trajectories, strict=strict)
        )
    except ExceptionGroup as group:  # from the branch that failed; the others were cancelled
        raise group.exceptions[0] from group
