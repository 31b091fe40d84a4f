"""The problems that a finished run has solved, by its structured logs, and the data files without them.

A problem is solved if in its last group all rollouts have a reward above `roc.positive_above`. A rollout that failed or was
aborted is not solved. Problems without a group, and those of unfinished groups, are not solved either.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bus.addresses import HEAD, ROLLOUT
from configs.atomic_write import replacing_file
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from engine.data.data_files import read_rows


class _Group(NamedTuple):
    problem: str  # "FILE:ROW", as engine.data.datasets.DatasetProblem.name
    size: int  # rollouts


class UnsolvedCount(NamedTuple):
    rows: int
    solved: int  # of the rows

    @property
    def unsolved(self) -> int:
        return self.rows - self.solved


def read_solved_problems(folder: RunFolder, positive_above: float) -> set[str]:
    """Names "FILE:ROW". Raises UnusableInput without logs, and for a damaged one."""
    groups: dict[int, _Group] = {}
    for line in _read_log(folder.logs / f"{HEAD}.jsonl", "group.started"):
        if line["purpose"] == "train":
            groups[line["group_id"]] = _Group(line["problem"], line["size"])
    solved_rollouts: dict[int, dict[int, bool]] = {group_id: {} for group_id in groups}
    for line in _read_log(folder.logs / f"{ROLLOUT}.jsonl", "trajectory.ended"):
        if (rollouts := solved_rollouts.get(line["group_id"])) is not None:
            reward = line["reward"]  # of a repeated group, the later one counts
            rollouts[line["trajectory_id"]] = reward is not None and reward > positive_above
    is_solved: dict[str, bool] = {}
    for group_id, group in sorted(groups.items()):  # ids rise
        rollouts = solved_rollouts[group_id]
        is_solved[group.problem] = len(rollouts) == group.size and all(rollouts.values())
    return {problem for problem, solved in is_solved.items() if solved}


def write_unsolved_rows(source: Path, solved: set[str], target: Path) -> UnsolvedCount:
    """The rows of `source` that are not solved, as JSONL. Raises UnusableInput if none is left, and DiskError."""
    num_rows = num_solved = 0
    with replacing_file(target) as file:
        for row in read_rows(source):
            num_rows += 1
            if f"{row.path.name}:{row.number}" in solved:
                num_solved += 1
            else:
                file.write(msgspec.json.encode(row.fields, enc_hook=str) + b"\n")
        if num_solved == num_rows:
            raise UnusableInput(f"{source}: all {num_rows:,} problems are solved, so that none is left for this stage")
    return UnsolvedCount(num_rows, num_solved)


def _read_log(path: Path, event: str) -> Iterator[dict[str, Any]]:
    """Lines of one event. A kill can leave the last line incomplete."""
    marker = f'"{event}"'.encode()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if marker not in line:
                    continue
                try:
                    fields = msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.DecodeError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise UnusableInput(f"{path}: line {number}: {error}") from None
                if fields.get("event") == event:
                    yield fields
    except OSError as error:
        raise UnusableInput(f"{path}: {error.strerror}; solved problems are read from this log") from None
