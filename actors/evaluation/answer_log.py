"""The head process writes the answers of evaluations to answers.jsonl.

An observer of the deciders passes each end of an evaluated trajectory to AnswerLog. A thread decodes it, appends a
line and synchronizes the file. The line may precede the commit of its event, and a head that recovers from a kill
observes its events again, so an answer is written only once. The answers in flight bound the thread's queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.json import encode
from msgspec.structs import replace

from asterism.actors.runtime.decider_loop import Observer
from asterism.analysis.evaluation.answer_records import (
    AnswerRecord,
    AnswerTurn,
    cut_torn_line,
    iter_complete_lines,
    parse_line,
    read_answers,
    sort_answers,
)
from asterism.bus.messages import (
    AnyMessage,
    EvaluationRequested,
    StartGroup,
    TokenRecord,
    TrajectoryFailed,
    TrajectoryFinished,
)
from asterism.configs.atomic_write import raising_disk_errors, replacing_file
from asterism.configs.schema.success import SuccessRule
from asterism.policies.decider import Send
from asterism.policies.dialogue.release_text import find_response_answer
from asterism.policies.groups.evaluation_questions import PlannedAnswer
from asterism.policies.rollout.trajectory import Rules


class AnswerStart(NamedTuple):
    request: EvaluationRequested
    group: StartGroup
    planned: PlannedAnswer


class AnswerLog:
    def __init__(
        self, path: Path, rules: Mapping[str, Rules], success: SuccessRule, *, has_dialogues: bool = False
    ) -> None:
        """`rules`: the rules by name of the task. `has_dialogues`: lines contain the texts of responses."""
        self._path, self._rules = path, rules
        self._success, self._has_dialogues = success, has_dialogues
        cut_torn_line(path)
        self._records = {each.key: each for each in read_answers(path)}
        self._thread = ThreadPoolExecutor(1, "answers")
        self._last_write: Future[None] | None = None
        self._error: Exception | None = None  # error of the first answer that is not written

    def append(self, start: AnswerStart, end: TrajectoryFinished | TrajectoryFailed) -> None:
        """Write the answer in the background. Raises the error of an earlier answer, such as DiskError."""
        if self._error is not None:
            raise self._error
        self._last_write = self._thread.submit(self._append, start, end)

    async def list_answers(self, label: str, version: int) -> list[AnswerRecord]:
        """List one evaluation's answers, sorted, without dialogues. Raises the error of an earlier answer."""
        if self._last_write is not None:
            await asyncio.wrap_future(self._last_write)
        if self._error is not None:
            raise self._error
        records = list(self._records.values())
        return sort_answers(each for each in records if (each.label, each.version) == (label, version))

    def close(self) -> None:
        self._thread.shutdown()

    def _append(self, start: AnswerStart, end: TrajectoryFinished | TrajectoryFailed) -> None:
        """Write the answer on the thread. After an error the last line may be torn, and no line may follow it."""
        if self._error is not None:
            return
        key = start.request.label, start.request.version, start.group.seed
        known = self._records.get(key)
        if known is not None and (not known.is_failed or isinstance(end, TrajectoryFailed)):
            return
        try:
            record = self._build_record(start, end)
            self._write(encode(record) + b"\n")
        except Exception as error:  # this is the top of the thread: the next call of this class raises the error
            self._error = error
            raise
        self._records[key] = replace(record, dialogue=())

    def _write(self, line: bytes) -> None:
        with raising_disk_errors(self._path), self._path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _build_record(self, start: AnswerStart, end: TrajectoryFinished | TrajectoryFailed) -> AnswerRecord:
        group, planned = start.group, start.planned
        record = AnswerRecord(
            label=start.request.label,
            version=start.request.version,
            set=planned.evaluation_set,
            task=group.task,
            place=planned.place,
            question=group.problem,
            sample=planned.sample,
            seed=group.seed,
            trajectory=end.trajectory_id,
            gold=group.ground_truth,
            ending="failed",
        )
        if isinstance(end, TrajectoryFailed):
            return replace(record, cause=end.cause)
        rules = self._rules[group.task]
        return replace(
            record,
            ending=end.ending,
            answer=extract_answer(rules, end),
            correct=self._success.is_met(end.reward, end.components),
            reward=end.reward,
            components=end.components,
            turns=end.turns,
            calls=end.calls,
            calls_failed=end.calls_failed,
            prompt_tokens=end.record.prompt_tokens,
            response_tokens=end.record.response_tokens,
            generated_tokens=end.record.loss_mask.count(1),
            seconds=end.lease_wait_s + end.generation_s + end.tools_s + end.grading_s,
            digest=hashlib.blake2b(end.record.token_ids, digest_size=8).hexdigest(),
            dialogue=split_turns(rules, end.record) if self._has_dialogues else (),
        )


class AnswerObserver:
    """An observer that passes ends of evaluated trajectories to the log, and every decision to another observer
    (asterism.actors.runtime.decider_loop.Observer)."""

    def __init__(self, log: AnswerLog, planned: Sequence[PlannedAnswer], other: Observer) -> None:
        self._log, self._other = log, other
        self.quiet = False  # whether `other` is quiet; an answer is written once in any case
        self._planned = {each.seed: each for each in planned}
        self._request: EvaluationRequested | None = None
        self._open: dict[int, AnswerStart] = {}  # answers in flight, by group

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        self._other.quiet = self.quiet
        self._other.on_decision(now, event, effects)
        match event:
            case EvaluationRequested():
                self._request = event
            case TrajectoryFinished(group_id=group_id) | TrajectoryFailed(group_id=group_id) if group_id in self._open:
                self._log.append(self._open.pop(group_id), event)
            case _:
                pass
        for effect in effects:
            match effect.message:
                case StartGroup(purpose="evaluate") as group if self._request is not None:
                    self._open[group.group_id] = AnswerStart(self._request, group, self._planned[group.seed])
                case _:
                    pass


# ---------------------------------------------------------------- one answer


def extract_answer(rules: Rules, end: TrajectoryFinished) -> str | None:
    """Return the answer that the rollout extracted for the grader; the text is empty without an answer or a grading.

    The answer is None for an environment or a dialogue: their rewards need none.
    """
    if rules.kind != "tools":
        return None
    if rules.graded_text == "response":
        return find_response_answer(rules.renderer.decode_response(end.record), rules.dialogue) or ""
    if end.ending != "answered":
        return ""
    return rules.renderer.parse_turn(end.record.token_ids, find_last_turn(end.record)).answer or ""


def find_last_turn(record: TokenRecord) -> int:
    """Return the position of the first token of the last generated turn."""
    return record.loss_mask.rstrip(b"\x00").rfind(b"\x00") + 1


def split_turns(rules: Rules, record: TokenRecord) -> tuple[AnswerTurn, ...]:
    """Split the response into turns of the model and of its environment, in order."""
    turns: list[AnswerTurn] = []
    start, mask = record.prompt_tokens, record.loss_mask
    while start < len(mask):
        end = mask.find(1 - mask[start], start)
        end = len(mask) if end < 0 else end
        part = record.token_ids[4 * start : 4 * end]
        turns.append(AnswerTurn("assistant" if mask[start] else "environment", _decode(rules, part), end - start))
        start = end
    return tuple(turns)


def _decode(rules: Rules, part: bytes) -> str:
    count = len(part) // 4
    return rules.renderer.decode_response(TokenRecord(0, part, bytes(count), bytes(4 * count), bytes(4 * count)))


def drop_answers_after(path: Path, step: int) -> None:
    """Remove the answers of weights after `step`, from which a run resumes, or all answers if the run starts again.

    Raises UnusableInput for a damaged line.
    """
    if path.exists():
        with replacing_file(path) as file:
            for number, line in enumerate(iter_complete_lines(path) if step else (), 1):
                if parse_line(path, number, line, _EvaluatedVersion).version <= step:
                    file.write(line)


class _EvaluatedVersion(Struct):
    version: int
