"""Result files of `asterism eval` are written into its run's folder, from answers.jsonl and the files of questions.

results.json     figures by set and difficulty, and the settings that they depend on; docs/evaluation.md lists the keys
questions.jsonl  one line per question: its gold answer, and each answer with reward, ending, tokens, calls and seed
traces.jsonl     one line per answer with its dialogue, in the fields of verifiers' traces
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asterism.actors.evaluation.provenance import Provenance, name_model, name_set
from asterism.analysis.evaluation.answer_records import AnswerRecord, iter_answers, read_answers
from asterism.analysis.evaluation.exchange_formats import build_benchmark_result, build_trace
from asterism.analysis.evaluation.set_results import (
    EvaluatedQuestion,
    SetResult,
    compute_set_result,
    group_questions,
    split_by_difficulty,
)
from asterism.configs.atomic_write import replacing_file, write_atomically
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import EvaluationSetConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.datasets import QuestionReport, read_problems
from asterism.engine.data.task_inputs import get_row_layout, read_task_descriptions
from asterism.policies.evaluation_recipe import EVALUATED_VERSION
from asterism.policies.step_evaluations import EvaluationPlan

_DIFFICULTY_FIELDS = ("difficulty", "level", "Difficulty", "Level")


class AskedSet(NamedTuple):
    config: EvaluationSetConfig
    texts: Mapping[str, str]  # texts of the questions, by name
    questions: Sequence[EvaluatedQuestion]
    result: SetResult


def write_results(run: RunConfig, folder: RunFolder, provenance: Provenance) -> dict[str, Any]:
    """Write the files and return the content of results.json. Raises UnusableInput for an unreadable file."""
    answers = read_answers(folder.answers)
    sets = [_evaluate_set(run, folder, each, answers) for each in run.resolved_evaluation_sets if each.data]
    results = build_results(run, sets, provenance)
    _write_questions(folder.path / "questions.jsonl", sets)
    _write_traces(folder, run, sets, {each.key: each for each in answers}, name_model(run, provenance))
    write_atomically(folder.results, msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    return results


def build_results(run: RunConfig, sets: Sequence[AskedSet], provenance: Provenance) -> dict[str, Any]:
    request = _get_request(run)
    return {
        "name": run.name,
        "results": [build_benchmark_result(name_set(each.config), each.result) for each in sets],
        "sets": {name_set(each.config): _describe_set(run, each, provenance) for each in sets},
        "sampling": {
            **msgspec.structs.asdict(request.sampling),
            "seed": run.seed,
            "determinism": run.determinism,
        },
        **_describe_task(run, run.resolved_tasks[0]),
        "engine": {"kind": run.engine.kind, "dtype": run.engine.dtype},
        "weights": provenance.weights,
        "verifier": {"name": "math-verify", "version": version("math-verify"), "accept": run.acceptance},
        "asterism": version("asterism"),
    }


def _describe_set(run: RunConfig, each: AskedSet, provenance: Provenance) -> dict[str, Any]:
    levels = split_by_difficulty(each.questions)
    results = {
        level: compute_set_result(questions, each.config.samples, run.seed) for level, questions in levels.items()
    }
    return {
        **msgspec.to_builtins(each.result, str_keys=True),
        "task": each.config.task,
        **_describe_task(run, _find_task(run, each.config)),
        "data": each.config.data,
        "data_sha256": provenance.data[name_set(each.config)],
        "by_difficulty": {level: msgspec.to_builtins(result, str_keys=True) for level, result in results.items()},
    }


def _describe_task(run: RunConfig, task: TaskConfig) -> dict[str, Any]:
    dialogue = task.get_dialogue()
    return {
        "limits": {
            "prompt_tokens": dialogue.prompt_tokens,
            "response_tokens": run.limit_evaluated_response(task),
            "max_turns": dialogue.max_turns,
            "max_calls_per_turn": dialogue.max_calls_per_turn,
            "call_time_s": run.sandbox.time_limit_s,
        },
        "tools": list(dialogue.tools),
    }


def _find_task(run: RunConfig, config: EvaluationSetConfig) -> TaskConfig:
    return next(each for each in run.resolved_tasks if each.name == config.task)


def _get_request(run: RunConfig) -> Any:
    return EvaluationPlan.from_config(run).build_request(run.evaluation.during, EVALUATED_VERSION)


# ---------------------------------------------------------------- questions


def _evaluate_set(
    run: RunConfig, folder: RunFolder, config: EvaluationSetConfig, answers: Sequence[AnswerRecord]
) -> AskedSet:
    own = [each for each in answers if (each.set, each.task) == (config.name, config.task)]
    texts, difficulties = read_questions(run, folder, config)
    over_limit = find_over_limit(list(texts), {each.question for each in own}, config.questions)
    questions = group_questions(own, difficulties, over_limit)
    return AskedSet(config, texts, questions, compute_set_result(questions, config.samples, run.seed))


def read_questions(
    run: RunConfig, folder: RunFolder, config: EvaluationSetConfig
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (texts, difficulties), by name of the question, in the order of the file."""
    task = _find_task(run, config)
    layout = get_row_layout(task, read_task_descriptions(folder)[task.name])._replace(all_columns=True)
    texts: dict[str, str] = {}
    difficulties: dict[str, str] = {}
    for problem in read_problems(folder.expand_path(config.data), QuestionReport(QuestionReport()), layout=layout):
        texts[problem.name] = problem.question
        extra = problem.fields.get("extra_info")
        for fields in (problem.fields, extra if isinstance(extra, dict) else {}):
            found = next((fields[key] for key in _DIFFICULTY_FIELDS if fields.get(key) not in (None, "")), None)
            if found is not None:
                difficulties.setdefault(problem.name, str(found))
    return texts, difficulties


def find_over_limit(names: Sequence[str], asked: set[str], limit: int) -> list[str]:
    """List the questions of the file that were skipped because of long prompts. If the set has reached its limit, only
    questions before the last asked one count."""
    last = max((place for place, name in enumerate(names) if name in asked), default=-1)
    considered = names[: last + 1] if len(asked) >= limit else names
    return [name for name in considered if name not in asked]


# ---------------------------------------------------------------- files


def _write_questions(path: Path, sets: Sequence[AskedSet]) -> None:
    with replacing_file(path) as file:
        for each in sets:
            for question in each.questions:
                file.write(msgspec.json.encode(_describe_question(each, question)) + b"\n")


def _describe_question(each: AskedSet, question: EvaluatedQuestion) -> dict[str, Any]:
    keys = (
        *("sample", "trajectory", "seed", "answer", "correct", "reward", "ending", "cause"),
        *("turns", "calls", "calls_failed", "response_tokens", "generated_tokens", "digest"),
    )
    return {
        "set": name_set(each.config),
        "question": question.name,
        "text": each.texts.get(question.name, ""),
        "gold": question.answers[0].gold if question.answers else "",
        "difficulty": question.difficulty,
        "over_limit": question.is_over_limit,
        "score": question.score if question.has_result else None,
        "answers": [{key: getattr(answer, key) for key in keys} for answer in question.answers],
    }


def _write_traces(
    folder: RunFolder,
    run: RunConfig,
    sets: Sequence[AskedSet],
    final: Mapping[tuple[str, int, int], AnswerRecord],
    model: str,
) -> None:
    """Write one answer at a time: the dialogues of all answers may not fit into memory."""
    request, texts = _get_request(run), {(each.config.name, each.config.task): each.texts for each in sets}
    with replacing_file(folder.path / "traces.jsonl") as file:
        for answer in _iter_final(folder.answers, final):
            text = texts[answer.set, answer.task].get(answer.question, "")
            trace = build_trace(answer, text, model, request.sampling, version("asterism"))
            file.write(msgspec.json.encode(trace) + b"\n")


def _iter_final(path: Path, final: Mapping[tuple[str, int, int], AnswerRecord]) -> Iterator[AnswerRecord]:
    written: set[tuple[str, int, int]] = set()
    for answer in iter_answers(path):
        if answer.key not in written and answer.is_failed == final[answer.key].is_failed:
            written.add(answer.key)
            yield answer
