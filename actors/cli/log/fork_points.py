"""The turns from which `asterism log fork` can continue a trajectory, and the checkpoint that each turn needs.

Both come from the events of one trajectory, which takes milliseconds. A replay up to a late trajectory takes a minute.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import numpy as np

from asterism.bus.addresses import ROLLOUT
from asterism.bus.event_log.reader import decode_event, read_events
from asterism.bus.messages import StartGroup, TurnGenerated
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.engine.hf.weight_files import list_weight_files
from asterism.engine.learner.checkpoints.checkpoint_folders import CHECKPOINT_NAME


class ForkableTurn(NamedTuple):
    turn: int  # number of the turn, from 0
    version: int  # version of the policy that generated the turn's first token
    problem: str  # reason why the version has no usable checkpoint; empty if it has one


def list_forkable_turns(folder: RunFolder, trajectory: int) -> list[ForkableTurn]:
    """Return the turns with logged tokens, or an empty list without a log of the rollout process."""
    problems: dict[int, str] = {}
    turns: list[ForkableTurn] = []
    for turn, version in sorted(read_turn_versions(folder, trajectory).items()):
        if version not in problems:
            problems[version] = find_checkpoint_problem(folder, version)
        turns.append(ForkableTurn(turn, version, problems[version]))
    return turns


def read_turn_versions(folder: RunFolder, trajectory: int) -> Mapping[int, int]:
    """Return the version of each logged turn's first token. The latest trajectory of this number counts."""
    log = folder.events / f"{ROLLOUT}.sqlite"
    versions: dict[int, int] = {}
    kinds = [StartGroup.__name__, TurnGenerated.__name__]
    for event, _ in read_events(log, trajectory=trajectory, with_group=True, kinds=kinds) if log.exists() else ():
        message = decode_event(log, event).message
        if isinstance(message, StartGroup):
            versions.clear()
        elif isinstance(message, TurnGenerated) and message.trajectory_id == trajectory and message.versions:
            versions.setdefault(message.turn, int(np.frombuffer(message.versions, np.int32)[0]))
    return versions


def find_checkpoint_problem(folder: RunFolder, version: int) -> str:
    """Return why no branch can use the weights of this version, or an empty text if a branch can."""
    checkpoint = folder.get_checkpoint_path(version)
    if not checkpoint.is_dir():
        return "not kept (learner.checkpoints.keep)"
    if not list_weight_files(checkpoint)[0].exists():
        return "without an exported model (learner.checkpoints.export_every)"
    return ""


def require_checkpoint(folder: RunFolder, trajectory: int, turn: int, version: int) -> None:
    """Raise UnusableInput if no branch can use the weights of this version."""
    checkpoint, remedy = folder.get_checkpoint_path(version), describe_remedy(folder)
    if not checkpoint.is_dir():
        raise UnusableInput(
            f"{checkpoint}: the run has not kept policy version {version}, which generated turn {turn} of "
            f"trajectory {trajectory}: {remedy}"
        )
    if find_checkpoint_problem(folder, version):
        raise UnusableInput(f"{checkpoint}: has no exported model (learner.checkpoints.export_every): {remedy}")


def describe_remedy(folder: RunFolder) -> str:
    existing = sorted(path.name for path in folder.checkpoints.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name))
    return f"name a checkpoint with --checkpoint; {folder.checkpoints} has {', '.join(existing) or 'none'}"


def format_forkable_turns(turns: list[ForkableTurn]) -> list[str]:
    """Format one line for each series of turns with the same version."""
    lines: list[str] = []
    for (version, problem), group in groupby(turns, key=lambda each: each[1:]):
        numbers = [each.turn for each in group]
        name = f"turn {numbers[0]}" if len(numbers) == 1 else f"turns {numbers[0]} to {numbers[-1]}"
        needed = (
            f"version {version} is {problem}: needs --checkpoint FOLDER" if problem else f"policy version {version}"
        )
        lines.append(f"log fork: {name}, {needed}")
    return lines
