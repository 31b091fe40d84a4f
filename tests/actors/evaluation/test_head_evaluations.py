"""The head adds the figures of each evaluation set to the metrics line of an evaluation."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from asterism.actors.evaluation.answer_log import AnswerLog
from asterism.actors.evaluation.head_evaluations import EvaluationMetrics
from asterism.analysis.evaluation.answer_records import AnswerRecord
from asterism.bus.messages import AnyMessage, MetricsRecorded
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import EvaluationConfig, EvaluationSetConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.tasks import MATH_PYTHON

EASY = AnswerRecord(
    label="end_sampled",
    version=4,
    set="aime",
    place=0,
    question="aime.jsonl:2",
    sample=0,
    seed=1,
    gold="2",
    ending="done",
    answer="2",
    correct=True,
    reward=1.0,
)


class Answers:
    """A replacement of the answer log: it has no answers to the first question and correct ones to the second."""

    async def list_answers(self, label: str, version: int) -> list[AnswerRecord]:
        return [EASY, msgspec.structs.replace(EASY, sample=1, seed=2)]


@pytest.mark.real_clock
async def test_a_question_over_the_prompt_limit_counts_as_wrong(tmp_path: Path) -> None:
    data = tmp_path / "aime.jsonl"
    data.write_text('{"question": "a long text", "answer": "1"}\n{"question": "1 + 1?", "answer": "2"}\n')
    asked = EvaluationSetConfig(name="aime", data=str(data), samples=2)
    run, folder = RunConfig(name="r", evaluation=EvaluationConfig(sets=(asked,))), RunFolder(tmp_path / "run")
    folder.task_descriptions.parent.mkdir(parents=True)
    folder.task_descriptions.write_bytes(msgspec.json.encode({"": MATH_PYTHON}))
    written: list[Any] = []

    async def write(message: AnyMessage) -> None:
        written.append(message)

    metrics = EvaluationMetrics(run, folder, cast(AnswerLog, Answers()), write)
    await metrics.write(MetricsRecorded("evaluation", 4, "end_sampled", {"accuracy": 1.0}))
    (line,) = written
    assert line.values["accuracy"] == 1.0
    assert [line.values[f"set aime: {key}@2"] for key in ("avg", "pass", "majority")] == [0.5, 0.5, 0.5]
