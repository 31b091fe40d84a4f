"""Builds the deciders of each process from the run's folder only, for live processes, recovery and replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import structlog

from actors.runtime.logged_problems import LoggedProblems, ProblemCounts, read_problem_counts, write_problem_counts
from bus.addresses import ARBITER, HEAD, RECIPE, ROLLOUT, is_generator, name_executor, name_generator
from bus.bus import Bus
from bus.messages import EngineLeft, ids_to_bytes
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.data.data_files import DatasetError
from engine.data.datasets import DatasetProblem, QuestionReport, read_problems
from engine.model.tokenizer import FastTokenizer, load_tokenizer
from policies.arbiter.arbiter import Arbiter
from policies.decider import Decider
from policies.dialogue.chat_format import TextTokenizer, build_dialogue_format, build_prompt_segments
from policies.groups.group_buffer import GroupBuffer
from policies.groups.group_starter import TokenizedProblem
from policies.recipe import Recipe
from policies.rollout.rollout import Rollout
from policies.rollout.trajectory import Rules
from policies.step_metrics import Recorder

STOP_TIMEOUT_S = 2.0
SERVER_STOP_TIMEOUT_S = 4.0


def list_executors(run: RunConfig) -> tuple[str, ...]:
    return tuple(name_executor(index) for index in range(run.sandbox.executors))


def list_generators(run: RunConfig) -> tuple[str, ...]:
    return tuple(name_generator(index) for index in range(run.engine.num_engines))


def get_stop_timeout_s(run: RunConfig, process: str) -> float:
    """Time from Shutdown to the kill. A generator that stops an SGLang server gets more."""
    serves = run.engine.kind == "sglang" and is_generator(process)
    return STOP_TIMEOUT_S + (SERVER_STOP_TIMEOUT_S if serves else 0.0)


async def send_engine_left(bus: Bus, left: EngineLeft) -> None:
    for address in (ARBITER, RECIPE, ROLLOUT):
        await bus.send(address, left)


def build_rules(run: RunConfig, tokenizer: FastTokenizer) -> Rules:
    dialogue = run.dialogue
    return Rules(
        dialogue=build_dialogue_format(dialogue),
        response_tokens=dialogue.response_tokens,
        max_turns=dialogue.max_turns,
        max_calls_per_turn=dialogue.max_calls_per_turn,
        result_characters=dialogue.result_characters,
        top_p=run.sampling.top_p,
        top_k=run.sampling.top_k,
        stop_token_ids=tuple(tokenizer.get_token_id(text) for text in dialogue.stop_tokens),
        result_format=dialogue.result_format,
    )


def build_head_deciders(run: RunConfig, problems: ProblemSets) -> dict[str, Decider]:
    engines = list_generators(run)
    return {
        "arbiter": Arbiter(
            run.arbiter.policy, run.dialogue.response_tokens, ends_at_first_groups=run.rl.group_oversampling > 1
        ),
        "buffer": GroupBuffer(run, problems.train, problems.test, (ROLLOUT,)),
        "recipe": Recipe(
            run.rl.steps, run.evaluation.questions, run.sampling.temperature, engines, run.rl.max_staleness
        ),
        "recorder": Recorder(run.rl.steps),
    }


def build_live_head_deciders(run: RunConfig, folder: RunFolder) -> dict[str, Decider]:
    """Raises engine.data.datasets.DatasetError and tokenizer errors."""
    problems = load_problem_sets(run, folder, load_tokenizer(folder.expand_path(run.model.checkpoint)))
    write_problem_counts(folder, ProblemCounts(len(problems.train), len(problems.test)))
    return build_head_deciders(run, problems)


def build_deciders(
    process: str, run: RunConfig, folder: RunFolder, logs_may_grow: Callable[[], bool] = lambda: False
) -> dict[str, Decider]:
    """The deciders of a process by name; those of the head take the problems from the rollout process's log.

    Raises engine.data.datasets.DatasetError and tokenizer errors.
    """
    tokenizer = load_tokenizer(folder.expand_path(run.model.checkpoint))
    if process != HEAD:
        return {process: Rollout(build_rules(run, tokenizer), tokenizer)}
    counts, log = read_problem_counts(folder), folder.events / f"{ROLLOUT}.sqlite"
    load_all = cache(lambda: load_problem_sets(run, folder, tokenizer))
    if counts is None or not log.exists():
        return build_head_deciders(run, load_all())
    train = LoggedProblems(log, run, "train", counts.train, lambda: load_all().train, logs_may_grow)
    test = LoggedProblems(log, run, "evaluate", counts.test, lambda: load_all().test, logs_may_grow)
    return build_head_deciders(run, ProblemSets(train, test))


# ---------------------------------------------------------------- questions


class ProblemSets(NamedTuple):
    train: Sequence[TokenizedProblem]
    test: Sequence[TokenizedProblem]


def load_problem_sets(run: RunConfig, folder: RunFolder, tokenizer: TextTokenizer) -> ProblemSets:
    """Raises DatasetError, also if no prompt is short enough."""
    report = QuestionReport()
    train = _load_set(run, folder, tokenizer, run.data.train, report)
    if not run.evaluation.questions:
        return ProblemSets(train, ())
    return ProblemSets(train, _load_set(run, folder, tokenizer, run.data.test, QuestionReport(report)))


def _load_set(
    run: RunConfig, folder: RunFolder, tokenizer: TextTokenizer, file: str, report: QuestionReport
) -> list[TokenizedProblem]:
    """Prompts over the limit are skipped and counted in one warning."""
    problems: list[TokenizedProblem] = []
    longest, skipped, limit = 0, 0, run.dialogue.prompt_tokens
    path, logger = folder.expand_path(file), structlog.get_logger()
    before, _, after = (
        tokenizer.encode(text, trusted=trusted)
        for text, trusted in build_prompt_segments("", build_dialogue_format(run.dialogue))
    )
    has_functions = bool(run.reward.functions)
    for problem in read_problems(path, report, all_columns=has_functions):
        prompt = [*before, *tokenizer.encode(problem.question, trusted=False), *after]
        longest = max(longest, len(prompt))
        if len(prompt) > limit:
            skipped += 1
        else:
            row = encode_row(problem) if has_functions else b""
            problems.append(TokenizedProblem(problem.name, problem.ground_truth, ids_to_bytes(prompt), row))
    logger.info("questions.read", file=file, found=report.describe())
    for warning in report.list_warnings():
        logger.warning("questions.unusual", file=file, problem=warning)
    if skipped:
        counts = {"num_skipped": skipped, "num_kept": len(problems), "limit_tokens": limit, "longest_tokens": longest}
        logger.warning("prompts.skipped", file=file, **counts)
    if not problems:
        raise DatasetError(path, f"no prompt fits into dialogue.prompt_tokens = {limit}; the longest has {longest}")
    return problems


def encode_row(problem: DatasetProblem) -> bytes:
    """The row for reward functions, with the question and the ground truth as the run uses them."""
    row = {**problem.fields, "question": problem.question, "ground_truth": problem.ground_truth}
    return msgspec.json.encode(row, enc_hook=str)
