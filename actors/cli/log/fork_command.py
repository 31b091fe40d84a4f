"""`asterism log fork` continues a logged trajectory from one of its turns."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import uvloop
from msgspec.structs import replace
from rich.console import Console

from asterism.actors.cli.log.fork_points import describe_remedy, read_turn_versions, require_checkpoint
from asterism.actors.cli.log.fork_result import ForkPoint, ForkResult, build_fork_result, show_fork
from asterism.actors.cli.log.what_if import Conditions, answer_what_if
from asterism.actors.cli.sandbox_commands import make_sandbox_of_run, suppress_logs
from asterism.actors.replay.branch_runner import EndedTrajectory, continue_trajectories, fork_trajectories
from asterism.actors.replay.replay import ReplayedTrajectory, ResultOverride, find_log, replay_trajectory
from asterism.actors.runtime.wiring import build_rules
from asterism.bus.addresses import ROLLOUT
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import read_task_descriptions
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.rollout_policy import POLICIES
from asterism.policies.rollout.trajectory import Rules, Trajectory
from asterism.tasks.hosting.task_services import build_task_services


class ForkOptions(NamedTuple):
    trajectory: int
    turn: int
    tool_result: Path | None
    checkpoint: Path | None
    seed: int | None
    num_branches: int
    overrides: list[str]  # KEY=VALUE overrides of the tables engine and sandbox
    json_file: Path | None


def fork_trajectory(folder: RunFolder, options: ForkOptions, console: Console) -> int:
    """Return 1 if the infrastructure lost a branch, else 0. Raises UnusableInput and SandboxFailure."""
    _check_turn(folder, options)
    return answer_what_if(OtherBranches(options), folder, options.overrides, options.json_file, console)


class OtherBranches(NamedTuple):
    """The branches of a trajectory with another tool result, checkpoint or seed. Implements WhatIf."""

    options: ForkOptions
    tables = ("engine", "sandbox")

    def recompute(self, conditions: Conditions) -> ForkResult:
        folder, run, options = conditions.folder, conditions.other, self.options
        if run.rl.rollout_policy not in POLICIES:
            raise UnusableInput(
                f"{folder.path}: rl.rollout_policy = {run.rl.rollout_policy}: a trajectory may depend on its siblings, "
                "which a fork does not have"
            )
        tokenizer = load_tokenizer(folder.expand_path(run.model.checkpoint))
        rules = build_rules(run, read_task_descriptions(folder), tokenizer)
        point = _find_fork_point(folder, rules, options)
        checkpoint = _choose_checkpoint(folder, options, point.list_versions())
        trajectories = fork_trajectories(point.start, options.num_branches, options.seed)
        suppress_logs()
        _check_vocabulary(checkpoint, tokenizer)
        ended = _run_branches(run, folder, rules, checkpoint, trajectories)
        return build_fork_result(folder, point, checkpoint, tokenizer, ended)

    def show(self, result: ForkResult, console: Console) -> int:
        show_fork(result, console)
        return int(any(branch.outcome.infrastructure_failed for branch in result.branches))


# ---------------------------------------------------------------- fork point


def _check_turn(folder: RunFolder, options: ForkOptions) -> None:
    """Raise UnusableInput before the replay, which takes a minute for a late trajectory of a long run."""
    versions = read_turn_versions(folder, options.trajectory)
    last = max(versions, default=-1)
    if versions and not 0 <= options.turn <= last + 1:  # one more turn can have begun without a logged token
        raise _build_turn_error(folder, options, last + 1)
    if options.checkpoint is None and options.turn in versions:
        require_checkpoint(folder, options.trajectory, options.turn, versions[options.turn])


def _build_turn_error(folder: RunFolder, options: ForkOptions, num_turns: int) -> UnusableInput:
    turns = "only turn 0" if num_turns == 1 else f"turns 0 to {num_turns - 1}"
    return UnusableInput(f"--turn {options.turn}: {folder.path}: trajectory {options.trajectory} has {turns}")


def _find_fork_point(folder: RunFolder, rules: Mapping[str, Rules], options: ForkOptions) -> ForkPoint:
    def replay(tool_result: ResultOverride | None = None) -> ReplayedTrajectory:
        rollout = Rollout(rules)
        return replay_trajectory(find_log(folder, ROLLOUT), rollout, options.trajectory, tool_result)

    original = replay()
    if not 0 <= options.turn < len(original.turn_starts):
        raise _build_turn_error(folder, options, len(original.turn_starts))
    turn_start = original.turn_starts[options.turn]
    if options.tool_result is None:
        return ForkPoint(original, options.turn, turn_start, None)
    flag, stdout = f"--tool-result {options.tool_result}", _read_result_file(options.tool_result)
    if options.turn == 0:
        raise UnusableInput(f"{flag}: turn 0 follows no tool call; use a later --turn")
    if options.turn not in original.last_results:
        raise UnusableInput(f"{flag}: turn {options.turn - 1} ran no call, so there is no result to replace")
    changed = replay(ResultOverride(original.last_results[options.turn], stdout))
    if len(changed.turn_starts) <= options.turn:
        raise UnusableInput(f"{flag}: too long: it exhausts the response's tokens before turn {options.turn}")
    # The branches rebuild their notebook and instance from the calls that the original made.
    start = replace(changed.turn_starts[options.turn], cells=turn_start.cells, environment=turn_start.environment)
    return ForkPoint(original, options.turn, start, stdout)


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
    if not versions:
        raise UnusableInput(
            f"trajectory {options.trajectory} has no logged token of turn {options.turn}, so its policy is unknown: "
            f"{describe_remedy(folder)}"
        )
    require_checkpoint(folder, options.trajectory, options.turn, versions[0])
    return folder.get_checkpoint_path(versions[0])


def _check_vocabulary(checkpoint: Path, tokenizer: FastTokenizer) -> None:
    """Compare the model's vocabulary with the tokenizer's: the log holds token ids. Raises UnusableInput."""
    from asterism.engine.hf.tokenizer import check_vocabulary
    from asterism.engine.model.hf_checkpoint import load_model_config  # torch is slow to import

    check_vocabulary(load_model_config(checkpoint), tokenizer)
    if (checkpoint / "tokenizer.json").exists():
        load_tokenizer(checkpoint).check_same_vocabulary(tokenizer)


def _run_branches(
    run: RunConfig, folder: RunFolder, rules: Mapping[str, Rules], checkpoint: Path, trajectories: list[Trajectory]
) -> list[EndedTrajectory]:
    from asterism.engine.inference.embedded_factory import build_embedded_engine

    pages = -(-run.sequence_tokens // run.engine.page_tokens)
    needed = len(trajectories) * pages * run.engine.page_tokens
    engine = build_embedded_engine(run, checkpoint, kv_tokens=min(run.engine.kv_tokens, needed))
    sandbox = make_sandbox_of_run(run, folder, "fork")
    try:
        tasks = build_task_services(run, folder, read_task_descriptions(folder), sandbox, repeats_calls=True)
        strict = run.determinism == "strict"
        return uvloop.run(continue_trajectories(rules, engine, sandbox, trajectories, strict=strict, tasks=tasks))
    except ExceptionGroup as group:  # one branch has failed; the others were cancelled
        raise group.exceptions[0] from group
