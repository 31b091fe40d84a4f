"""The problems that a finished run has solved are read from its structured logs, and left out of the data files.

A problem is solved if in its last group all rollouts are successes (`evaluation.success`). A rollout that failed or was
aborted is not solved. Problems of unfinished groups are not solved either. Problems without a group are counted apart.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.configs.atomic_write import replacing_file
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.success import SuccessRule
from asterism.engine.data.datasets import RowLayout, make_training_report, read_problems


class _Group(NamedTuple):
    task: str  # name of the task
    problem: str  # "FILE:ROW", as asterism.engine.data.datasets.DatasetProblem.name
    size: int  # number of rollouts
    started_at: str  # time in ISO format


class ProblemResults(NamedTuple):
    """Names "FILE:ROW" of the problems of a task."""

    visited: set[str]  # problems with a group
    solved: set[str]


class UnsolvedCount(NamedTuple):
    problems: int
    solved: int
    unvisited: int  # problems without a group, which count as unsolved

    @property
    def unsolved(self) -> int:
        return self.problems - self.solved


def read_problem_results(folder: RunFolder, success: SuccessRule) -> Mapping[str, ProblemResults]:
    """Read the results by name of the task. Raises UnusableInput without logs, and for a damaged one."""
    groups: dict[int, _Group] = {}
    for line in _read_log(folder.logs / f"{HEAD}.jsonl", "group.started"):
        if line["purpose"] == "train":
            groups[line["group_id"]] = _Group(line["task"], line["problem"], line["size"], line["timestamp"])
    solved_rollouts: dict[int, dict[int, bool]] = {group_id: {} for group_id in groups}
    for line in _read_log(folder.logs / f"{ROLLOUT}.jsonl", "trajectory.ended"):
        group = groups.get(line["group_id"])
        if group is not None and line["timestamp"] >= group.started_at:  # a resumed run uses ids of groups again
            reward = line["reward"]
            is_met = reward is not None and success.is_met(reward, line.get("components") or {})
            solved_rollouts[line["group_id"]][line["trajectory_id"]] = is_met
    results: dict[str, ProblemResults] = {}
    for group_id, group in sorted(groups.items()):  # ids rise with time
        visited, solved = results.setdefault(group.task, ProblemResults(set(), set()))
        visited.add(group.problem)
        rollouts = solved_rollouts[group_id]
        is_solved = len(rollouts) == group.size and all(rollouts.values())
        if is_solved:
            solved.add(group.problem)
        else:
            solved.discard(group.problem)
    return results


def write_unsolved_rows(
    source: Path, layout: RowLayout, results: ProblemResults, target: Path, max_bad_rows: int = 0
) -> UnsolvedCount:
    """Write the unsolved rows of `source` as JSONL, without repeated and unusable ones, which a run drops.

    Raises DiskError, and UnusableInput if all problems are solved.
    """
    num_problems, num_solved, num_unvisited, report = 0, 0, 0, make_training_report(max_bad_rows)
    with replacing_file(target) as file:
        for problem in read_problems(source, report, layout=layout._replace(all_columns=True)):
            num_problems += 1
            num_unvisited += problem.name not in results.visited
            if problem.name in results.solved:
                num_solved += 1
            else:
                file.write(msgspec.json.encode(problem.fields, enc_hook=str) + b"\n")
        if num_solved == num_problems:
            raise UnusableInput(
                f"{source}: all {num_solved:,} problems are solved, so that none is left for this stage"
            )
    return UnsolvedCount(num_problems, num_solved, num_unvisited)


def _read_log(path: Path, event: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of one event. A kill can leave the last line incomplete."""
    marker = f'"{event}"'.encode()
    check_file(path)
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
