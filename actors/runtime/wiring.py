"""The deciders of each process are built from the run's folder only, for live processes, recovery and replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from asterism.actors.runtime.logged_problems import (
    LoggedProblems,
    ProblemCounts,
    read_problem_counts,
    write_problem_counts,
)
from asterism.bus.addresses import ARBITER, HEAD, RECIPE, ROLLOUT, is_generator, name_executor, name_generator
from asterism.bus.bus import Bus
from asterism.bus.messages import EngineLeft, ids_to_bytes
from asterism.configs.choices.engine_kinds import ENGINE_KINDS
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.data_files import DatasetError
from asterism.engine.data.datasets import QuestionReport, make_training_report, read_problems
from asterism.engine.data.task_inputs import (
    build_renderer,
    build_task_rules,
    encode_row,
    get_row_layout,
    read_task_descriptions,
)
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.decider import Decider
from asterism.policies.evaluation_recipe import EvaluationRecipe
from asterism.policies.groups.group_buffer import GroupBuffer
from asterism.policies.groups.group_starter import ProblemSet, TokenizedProblem
from asterism.policies.recipe import Recipe
from asterism.policies.recorder import Recorder
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.rollout_policy import load_rollout_policy
from asterism.policies.rollout.trajectory import Rules
from asterism.policies.step_evaluations import EvaluationPlan
from asterism.policies.tools.task_description import TaskDescription, TaskDescriptions

STOP_TIMEOUT_S = 2.0


def list_executors(run: RunConfig) -> tuple[str, ...]:
    return tuple(name_executor(index) for index in range(run.sandbox.executors))


def list_generators(run: RunConfig) -> tuple[str, ...]:
    return tuple(name_generator(index) for index in range(run.engine.num_engines))


def get_stop_timeout_s(run: RunConfig, process: str) -> float:
    """Return the seconds from Shutdown to the kill. A generator that stops a server gets more time."""
    return STOP_TIMEOUT_S + (ENGINE_KINDS[run.engine.kind].stop_allowance_s if is_generator(process) else 0.0)


async def send_engine_left(bus: Bus, left: EngineLeft) -> None:
    for address in (ARBITER, RECIPE, ROLLOUT):
        await bus.send(address, left)


def build_rules(run: RunConfig, descriptions: TaskDescriptions, tokenizer: FastTokenizer) -> dict[str, Rules]:
    """Build the rules of each task, by name."""
    return {task.name: build_task_rules(run, task, descriptions[task.name], tokenizer) for task in run.resolved_tasks}


def build_head_deciders(run: RunConfig, problems: ProblemSets) -> dict[str, Decider]:
    engines = list_generators(run)
    plan = EvaluationPlan.from_config(run)
    training = Recipe(plan, engines, run.rl.max_staleness, run.early_stopping)
    longest, ends_at_first_groups = run.longest_response_tokens, run.rl.group_oversampling > 1
    return {
        "arbiter": Arbiter(run.arbiter.policy, longest, ends_at_first_groups=ends_at_first_groups),
        "buffer": GroupBuffer(run, problems.train, problems.test, (ROLLOUT,)),
        "recipe": EvaluationRecipe(run) if run.evaluation.only else training,
        "recorder": Recorder(run.rl.steps, run.health),
    }


def build_live_head_deciders(run: RunConfig, folder: RunFolder) -> dict[str, Decider]:
    """Build the head's deciders. Raises asterism.engine.data.datasets.DatasetError and tokenizer errors."""
    problems = load_problem_sets(run, folder, load_tokenizer(folder.expand_path(run.model.checkpoint)))
    write_problem_counts(folder, ProblemCounts(problems.train.counts, problems.test.counts))
    return build_head_deciders(run, problems)


def build_deciders(
    process: str, run: RunConfig, folder: RunFolder, logs_may_grow: Callable[[], bool] = lambda: False
) -> dict[str, Decider]:
    """Build the deciders of a process by name; those of the head take the problems from the rollout process's log.

    Raises asterism.engine.data.datasets.DatasetError and tokenizer errors.
    """
    tokenizer = load_tokenizer(folder.expand_path(run.model.checkpoint))
    if process != HEAD:
        rules = build_rules(run, read_task_descriptions(folder), tokenizer)
        return {process: Rollout(rules, load_rollout_policy(run.rl))}
    counts, log = read_problem_counts(folder), folder.events / f"{ROLLOUT}.sqlite"
    load_all = cache(lambda: load_problem_sets(run, folder, tokenizer))
    if counts is None or not log.exists():
        return build_head_deciders(run, load_all())
    train = LoggedProblems(log, run, "train", counts.train, lambda: load_all().train.problems, logs_may_grow)
    test = LoggedProblems(log, run, "evaluate", counts.test, lambda: load_all().test.problems, logs_may_grow)
    return build_head_deciders(run, ProblemSets(ProblemSet(train, counts.train), ProblemSet(test, counts.test)))


# ---------------------------------------------------------------- questions


class ProblemSets(NamedTuple):
    train: ProblemSet
    test: ProblemSet


def load_problem_sets(run: RunConfig, folder: RunFolder, tokenizer: FastTokenizer) -> ProblemSets:
    """Load the problems. Raises DatasetError, also if no prompt of a task is short enough."""
    descriptions = read_task_descriptions(folder)
    train: list[list[TokenizedProblem]] = []
    test: list[list[TokenizedProblem]] = []
    reports = {task.name: make_training_report(run.data.max_bad_rows) for task in run.resolved_tasks}
    tasks = {task.name: task for task in run.resolved_tasks}
    for task in run.resolved_tasks if not run.evaluation.only else ():
        report = reports[task.name]
        train.append(_load_problems(task, descriptions[task.name], folder, tokenizer, task.data, report))
    for each in run.resolved_evaluation_sets:
        problems: list[TokenizedProblem] = []
        if run.evaluation.questions and each.data:
            report, task = QuestionReport(reports[each.task]), tasks[each.task]
            problems = _load_problems(task, descriptions[each.task], folder, tokenizer, each.data, report)
        test.append([replace(problem, evaluation_set=each.name) for problem in problems])
    return ProblemSets(_join_problems(train), _join_problems(test))


def _join_problems(by_task: list[list[TokenizedProblem]]) -> ProblemSet:
    return ProblemSet([problem for problems in by_task for problem in problems], tuple(map(len, by_task)))


def _load_problems(
    task: TaskConfig,
    description: TaskDescription,
    folder: RunFolder,
    tokenizer: FastTokenizer,
    file: str,
    report: QuestionReport,
) -> list[TokenizedProblem]:
    """Load the problems. Longer prompts are skipped; the limit does not count an environment's first observation."""
    problems: list[TokenizedProblem] = []
    renderer = build_renderer(task.get_dialogue(), description, tokenizer)
    longest, skipped, limit = 0, 0, task.get_dialogue().prompt_tokens
    path, logger = folder.expand_path(file), structlog.get_logger()
    layout = get_row_layout(task, description)
    for problem in read_problems(path, report, layout=layout):
        prompt = renderer.render_prompt(problem.question)
        longest = max(longest, len(prompt))
        if len(prompt) > limit:
            skipped += 1
        else:
            row = encode_row(problem) if layout.all_columns else b""
            problems.append(TokenizedProblem(problem.name, problem.ground_truth, ids_to_bytes(prompt), row, task.name))
    logger.info("questions.read", file=file, found=report.describe())
    for error in report.bad_rows.errors:
        logger.warning("row.skipped", file=file, problem=str(error))
    for warning in report.list_warnings():
        logger.warning("questions.unusual", file=file, problem=warning)
    if skipped:
        counts = {"num_skipped": skipped, "num_kept": len(problems), "limit_tokens": limit, "longest_tokens": longest}
        logger.warning("prompts.skipped", file=file, **counts)
    if not problems:
        raise DatasetError(path, f"no prompt fits into dialogue.prompt_tokens = {limit}; the longest has {longest}")
    return problems
