"""Loads the run's questions as prompts of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import structlog

from bus.messages import ids_to_bytes
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.data.datasets import DatasetError, read_problems
from policies.dialogue.chat_format import TextTokenizer, build_prompt_segments, encode_segments
from policies.groups.group_starter import TokenizedProblem


class ProblemSets(NamedTuple):
    train: Sequence[TokenizedProblem]
    test: Sequence[TokenizedProblem]


def load_problem_sets(run: RunConfig, folder: RunFolder, tokenizer: TextTokenizer) -> ProblemSets:
    """Raises DatasetError, also if no prompt is short enough."""
    return ProblemSets(*(_load_set(run, folder, tokenizer, path) for path in (run.data.train, run.data.test)))


def _load_set(run: RunConfig, folder: RunFolder, tokenizer: TextTokenizer, path: str) -> list[TokenizedProblem]:
    """Prompts over the limit are skipped and counted in one warning."""
    problems: list[TokenizedProblem] = []
    longest, skipped = 0, 0
    for problem in read_problems(folder.expand_path(path)):
        prompt = encode_segments(tokenizer, build_prompt_segments(problem.question, run.dialogue.tools))
        longest = max(longest, len(prompt))
        if len(prompt) > run.dialogue.prompt_tokens:
            skipped += 1
        else:
            problems.append(TokenizedProblem(problem.name, problem.ground_truth, ids_to_bytes(prompt)))
    limit = run.dialogue.prompt_tokens
    if skipped:
        structlog.get_logger().warning(
            "prompts.skipped",
            file=path,
            num_skipped=skipped,
            num_kept=len(problems),
            limit_tokens=limit,
            longest_tokens=longest,
        )
    if not problems:
        raise DatasetError(
            folder.expand_path(path), f"no prompt fits into dialogue.prompt_tokens = {limit}; the longest has {longest}"
        )
    return problems
