"""Scores the finished trajectories of a run again, from its event logs and without an engine."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from actors.runtime.wiring import encode_row
from analysis.event_logs.merged_events import EventFilter, merge_events
from bus.messages import AnswerSubmitted, RewardInput, StartGroup, TokenRecord, TrajectoryFinished, bytes_to_ids
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.data.datasets import QuestionReport, read_problems
from policies.dialogue.chat_format import DialogueFormat, TextTokenizer
from policies.dialogue.parse_turn import parse_assistant_turn
from sandbox.contract import SandboxFailure
from tasks.rewards.answer_scorer import AnswerScorer
from tasks.rewards.reward_client import RewardFailure

_CONCURRENT_SCORES = 64
_KINDS = (StartGroup.__name__, TrajectoryFinished.__name__)


class StoredTrajectory(NamedTuple):
    group: StartGroup
    finished: TrajectoryFinished


class RegradedTrajectory(msgspec.Struct, frozen=True):
    trajectory_id: int
    group_id: int
    problem: str
    ground_truth: str
    answer: str
    ending: str
    reward: float  # in the run
    components: dict[str, float]
    new_reward: float | None  # None: not scored, because of `failure`
    new_components: dict[str, float]
    failure: str = ""

    @property
    def is_changed(self) -> bool:
        return self.new_reward != self.reward


def read_stored_trajectories(folder: RunFolder, on_missing_group: Callable[[], None]) -> Iterator[StoredTrajectory]:
    """In the order of their ends; trajectories of a step that ran twice, as after a resume, both times."""
    groups: dict[int, StartGroup] = {}
    for logged in merge_events(folder, EventFilter(kinds=_KINDS)):
        message = logged.envelope.message
        if isinstance(message, StartGroup):
            groups[message.group_id] = message
        elif isinstance(message, TrajectoryFinished):
            if message.group_id in groups:
                yield StoredTrajectory(groups[message.group_id], message)
            else:
                on_missing_group()


async def regrade(
    trajectories: Iterable[tuple[StoredTrajectory, AnswerSubmitted]], scorer: AnswerScorer
) -> AsyncIterator[RegradedTrajectory]:
    """In the order of `trajectories`."""
    remaining = iter(trajectories)
    while chunk := list(itertools.islice(remaining, _CONCURRENT_SCORES)):
        for regraded in await asyncio.gather(*(_score(stored, submission, scorer) for stored, submission in chunk)):
            yield regraded


def rebuild_submission(
    stored: StoredTrajectory, tokenizer: TextTokenizer, dialogue: DialogueFormat, rows: Mapping[str, bytes] | None
) -> AnswerSubmitted:
    """`rows`: by problem, for reward functions; unnecessary if the log has the rows. None without reward functions.

    Raises UnusableInput for a problem without a row.
    """
    group, finished = stored
    record = finished.record
    answer = ""
    if finished.ending == "answered":
        answer = parse_assistant_turn(_decode_last_turn(record, tokenizer), dialogue).answer or ""
    reward_input = None
    if rows is not None:
        row = group.row or rows.get(group.problem, b"")
        if not row:
            raise UnusableInput(f"{group.problem}: data.train and data.test no longer have this row of the run")
        reward_input = RewardInput(finished.ending, row, record.prompt_tokens, record.token_ids, record.loss_mask)
    return AnswerSubmitted(finished.trajectory_id, answer, group.ground_truth, reward_input)


def _decode_last_turn(record: TokenRecord, tokenizer: TextTokenizer) -> str:
    start = record.loss_mask.rfind(b"\0") + 1
    return tokenizer.decode(bytes_to_ids(record.token_ids[4 * start :]))


async def _score(stored: StoredTrajectory, submission: AnswerSubmitted, scorer: AnswerScorer) -> RegradedTrajectory:
    group, finished = stored
    new_reward, new_components, failure = 0.0, dict[str, float](), ""
    if submission.reward_input is not None or finished.ending == "answered":
        try:
            score = await scorer.score(submission)
            new_reward, new_components = score.reward, score.components
        except (SandboxFailure, RewardFailure) as error:
            new_reward, failure = None, str(error)
    return RegradedTrajectory(
        trajectory_id=finished.trajectory_id,
        group_id=finished.group_id,
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
    """The rows of the run's data files. Raises UnusableInput, DatasetError."""
    report = QuestionReport()
    rows: Counter[str] = Counter()
    by_problem: dict[str, bytes] = {}
    for file, each in ((run.data.train, report), (run.data.test, QuestionReport(report))):
        if file == run.data.test and not run.evaluation.questions:
            continue
        for problem in read_problems(folder.expand_path(file), each, all_columns=True):
            rows[problem.name] += 1
            by_problem[problem.name] = encode_row(problem)
    if twice := [name for name, count in rows.items() if count > 1]:
        raise UnusableInput(f"data.train and data.test both have rows named {twice[0]}; rename one of the files")
    return by_problem
