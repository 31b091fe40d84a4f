"""Regrading scores the finished trajectories of a run again, from its event logs and without an engine."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from asterism.analysis.event_logs.merged_events import EventFilter, merge_events
from asterism.bus.messages import AnswerSubmitted, EnvironmentRestored, RewardInput, StartGroup, TrajectoryFinished
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.datasets import QuestionReport, RowLayout, make_training_report, read_problems
from asterism.engine.data.task_inputs import encode_row
from asterism.policies.dialogue.dialogue_renderer import DialogueRenderer
from asterism.sandbox.contract import SandboxFailure
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.hosting.task_services import TaskServices

_CONCURRENT_SCORES = 64
_KINDS = (StartGroup.__name__, TrajectoryFinished.__name__)


class StoredTrajectory(NamedTuple):
    group: StartGroup
    finished: TrajectoryFinished


class RegradedTrajectory(msgspec.Struct, frozen=True):
    trajectory_id: int
    group_id: int
    task: str
    problem: str
    ground_truth: str
    answer: str
    ending: str
    reward: float  # reward in the run
    components: dict[str, float]
    new_reward: float | None  # None: `failure` prevented the score
    new_components: dict[str, float]
    failure: str = ""

    @property
    def is_changed(self) -> bool:
        return self.new_reward != self.reward


def read_stored_trajectories(
    folder: RunFolder, on_missing_group: Callable[[], None], task: str = ""
) -> Iterator[StoredTrajectory]:
    """Yield the trajectories of `task`, or of all tasks, in order of their ends; a step that ran twice counts twice."""
    groups: dict[int, StartGroup] = {}
    for logged in merge_events(folder, EventFilter(kinds=_KINDS)):
        message = logged.envelope.message
        if isinstance(message, StartGroup):
            groups[message.group_id] = message
        elif isinstance(message, TrajectoryFinished):
            group = groups.get(message.group_id)
            if group is None:
                on_missing_group()
            elif task in ("", group.task):
                yield StoredTrajectory(group, message)


async def regrade(
    trajectories: Iterable[tuple[StoredTrajectory, AnswerSubmitted]], tasks: TaskServices
) -> AsyncIterator[RegradedTrajectory]:
    """Yield the results in the order of `trajectories`. The ids of the submissions must be distinct."""
    remaining = iter(trajectories)
    while chunk := list(itertools.islice(remaining, _CONCURRENT_SCORES)):
        for regraded in await asyncio.gather(*(_score(stored, submission, tasks) for stored, submission in chunk)):
            yield regraded


class SubmissionBuilder:
    """A builder of submissions. `renderers`: by task. `rows`: by problem, for reward functions; empty if the log has
    the rows, None without functions. Each submission has a new id, since a step may run twice."""

    def __init__(self, renderers: Mapping[str, DialogueRenderer], rows: Mapping[str, bytes] | None) -> None:
        self._renderers, self._rows = renderers, rows
        self._ids = itertools.count()

    def build(self, stored: StoredTrajectory) -> AnswerSubmitted:
        """Build the submission. Raises UnusableInput for a problem without a row."""
        group, finished = stored
        record, sums = finished.record, finished.environment
        answer = ""
        if finished.ending == "answered":
            last_turn = record.loss_mask.rfind(b"\0") + 1
            answer = self._renderers[group.task].parse_turn(record.token_ids, last_turn).answer or ""
        row = group.row
        if not row and self._rows is not None:
            row = self._rows.get(group.problem, b"")
            if not row:
                raise UnusableInput(f"{group.problem}: data.train and data.test no longer have this row of the run")
        tokens = record.prompt_tokens, record.token_ids, record.loss_mask
        reward_input = RewardInput(finished.ending, row, *tokens) if row else None
        return AnswerSubmitted(
            next(self._ids), answer, group.ground_truth, reward_input, group.task, sums.rewards, sums.metrics
        )


async def _score(stored: StoredTrajectory, submission: AnswerSubmitted, tasks: TaskServices) -> RegradedTrajectory:
    group, finished = stored
    new_reward, new_components, failure = 0.0, dict[str, float](), ""
    if submission.reward_input is not None or finished.ending == "answered":
        try:
            if calls := finished.environment.calls:
                sums = await tasks.repeat(EnvironmentRestored(submission.trajectory_id, group.task, calls))
                submission = replace(submission, rewards=sums.rewards, metrics=sums.metrics)
            score = await tasks.score(submission)
            new_reward, new_components = score.reward, score.components
        except (SandboxFailure, HostFailure) as error:
            new_reward, failure = None, str(error)
        finally:
            tasks.end(submission.trajectory_id)
    return RegradedTrajectory(
        trajectory_id=finished.trajectory_id,
        group_id=finished.group_id,
        task=group.task,
        problem=group.problem,
        ground_truth=group.ground_truth,
        answer=submission.answer,
        ending=finished.ending,
        reward=finished.reward,
        components=finished.components,
        new_reward=new_reward,
        new_components=new_components,
        failure=failure,
    )


def read_rows_by_problem(run: RunConfig, folder: RunFolder) -> dict[str, bytes]:
    """Read the rows of the data files of a run without [[tasks]]. Raises UnusableInput, DatasetError."""
    report = make_training_report(run.data.max_bad_rows)
    rows: Counter[str] = Counter()
    by_problem: dict[str, bytes] = {}
    evaluated = run.resolved_evaluation_sets if run.evaluation.questions else ()
    tests = [each.data for each in evaluated if each.data]
    for file, each in ((run.data.train, report), *((test, QuestionReport(report)) for test in tests)):
        for problem in read_problems(folder.expand_path(file), each, layout=RowLayout(all_columns=True)):
            rows[problem.name] += 1
            by_problem[problem.name] = encode_row(problem)
    if twice := [name for name, count in rows.items() if count > 1]:
        raise UnusableInput(f"data.train and data.test both have rows named {twice[0]}; rename one of the files")
    return by_problem
