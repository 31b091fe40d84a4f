"""The head process records answers and metrics of evaluations, and finds the answers of earlier launches."""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager

from msgspec.structs import replace

from asterism.actors.evaluation.answer_log import AnswerLog, AnswerObserver
from asterism.actors.evaluation.result_files import find_over_limit, read_questions
from asterism.actors.runtime.decider_loop import Observer, Service
from asterism.actors.runtime.logged_problems import read_problem_counts
from asterism.actors.runtime.wiring import build_rules
from asterism.analysis.evaluation.answer_records import AnswerRecord, read_answers
from asterism.analysis.evaluation.set_results import compute_metrics, compute_set_result, group_questions
from asterism.bus.addresses import HEAD
from asterism.bus.event_log.reader import find_epoch_start, read_messages
from asterism.bus.messages import AnyMessage, ComponentSum, MetricsRecorded, RunStarted, TaskCounts
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import EvaluationSetConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import read_task_descriptions
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.policies.groups.evaluation_questions import EvaluationQuestions
from asterism.policies.step_metrics import compute_component_metrics, name_ratios
from asterism.policies.task_counts import add_components, compute_answer_ratios, drop_undefined


@contextmanager
def recording_answers(run: RunConfig, folder: RunFolder, other: Observer) -> Generator[tuple[AnswerLog, Observer]]:
    """Open the log of answers, and an observer that writes to it and then calls `other`. The head must have loaded the
    problems."""
    tokenizer = load_tokenizer(folder.expand_path(run.model.checkpoint))
    rules, counts = build_rules(run, read_task_descriptions(folder), tokenizer), read_problem_counts(folder)
    assert counts is not None
    planned = EvaluationQuestions(run, counts.test).list_all()
    log = AnswerLog(folder.answers, rules, run.success, has_dialogues=run.evaluation.only)
    with closing(log):
        yield log, AnswerObserver(log, planned, other)


def find_answered(run: RunConfig, folder: RunFolder, epoch: int) -> tuple[int, ...]:
    """Return the seeds of the answers that a resumed `asterism eval` need not ask for.

    An incarnation that recovers from the log takes the seeds of this launch's first incarnation: its deciders must
    repeat their decisions.
    """
    if not run.evaluation.only:
        return ()
    log = folder.events / f"{HEAD}.sqlite"
    first = find_epoch_start(log, epoch)
    if first is not None:
        _, started = next(read_messages(log, RunStarted, since_seq=first))
        return started.answered
    return tuple(each.seed for each in read_answers(folder.answers) if not each.is_failed)


class EvaluationMetrics:
    """A service of the head that adds figures of the answers to the lines of evaluations, and passes all lines on."""

    def __init__(self, run: RunConfig, folder: RunFolder, log: AnswerLog, write: Service) -> None:
        self._run, self._folder, self._log, self._write = run, folder, log, write
        self._questions: dict[str, list[str]] = {}  # names of the questions, by set

    async def write(self, message: AnyMessage) -> None:
        if isinstance(message, MetricsRecorded) and message.kind == "evaluation":
            answers = await self._log.list_answers(message.label, message.step)
            values = await asyncio.to_thread(self._compute, answers)
            message = replace(message, values={**self._select_recorded(message), **values})
        await self._write(message)

    def _select_recorded(self, message: MetricsRecorded) -> dict[str, float]:
        """Return the values to keep: in `asterism eval`, the recorder lacks the answers of earlier launches."""
        kept = ("version", "other_version_tokens") if self._run.evaluation.only else message.values
        return {key: message.values[key] for key in kept}

    def _compute(self, answers: Sequence[AnswerRecord]) -> dict[str, float]:
        """Compute figures of sets with several answers per question; for `asterism eval`, also the recorder's keys."""
        values = self._count_all(answers) if self._run.evaluation.only else {}
        for each in self._run.resolved_evaluation_sets:
            own = [answer for answer in answers if answer.set == each.name]
            if own and each.name and each.samples > 1:
                questions = group_questions(own, over_limit=self._list_over_limit(each, own))
                values |= compute_metrics(each.name, compute_set_result(questions, each.samples))
        return values

    def _list_over_limit(self, each: EvaluationSetConfig, answers: Sequence[AnswerRecord]) -> list[str]:
        if each.name not in self._questions:
            self._questions[each.name] = list(read_questions(self._run, self._folder, each)[0])
        return find_over_limit(self._questions[each.name], {answer.question for answer in answers}, each.questions)

    def _count_all(self, answers: Sequence[AnswerRecord]) -> dict[str, float]:
        components: dict[str, ComponentSum] = {}
        for each in answers:
            components = add_components(components, each.components)
        sets = {name: [each for each in answers if each.set == name] for name in {each.set for each in answers} - {""}}
        values = {
            **compute_answer_ratios(_count(answers)),
            **compute_component_metrics(components),
            **name_ratios("set", {name: _count(own) for name, own in sets.items()}, compute_answer_ratios),
        }
        return drop_undefined(values)


def _count(answers: Sequence[AnswerRecord]) -> TaskCounts:
    results = [each for each in answers if not each.is_failed]
    return TaskCounts(
        trajectories=len(results),
        trajectories_failed=len(answers) - len(results),
        positives=sum(each.correct for each in results),
        reward=sum(each.reward for each in results),
        response_tokens=sum(each.response_tokens for each in results),
    )
