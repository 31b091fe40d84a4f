"""The run's questions, as prompts of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import structlog

from configs.run_folder import RunFolder
from configs.schema import Run
from engine.datasets import DatasetError, read_problems
from policies.dialogue import TextTokenizer, encode_pieces, prompt_pieces
from policies.group_buffer import Problem
from policies.record import ids_to_bytes


class Problems(NamedTuple):
    train: Sequence[Problem]
    test: Sequence[Problem]


def load_problems(run: Run, folder: RunFolder, tokenizer: TextTokenizer) -> Problems:
    """Raises DatasetError, also where no question is short enough."""
    return Problems(*(_load(run, folder, tokenizer, path) for path in (run.data.train, run.data.test)))


def _load(run: Run, folder: RunFolder, tokenizer: TextTokenizer, path: str) -> list[Problem]:
    """A prompt over the limit is skipped; how many there were is said once."""
    problems: list[Problem] = []
    longest, skipped = 0, 0
    for problem in read_problems(folder.expand(path)):
        prompt = encode_pieces(tokenizer, prompt_pieces(problem.question, run.dialogue.tools))
        longest = max(longest, len(prompt))
        if len(prompt) > run.dialogue.prompt_tokens:
            skipped += 1
        else:
            problems.append(Problem(problem.name, problem.ground_truth, ids_to_bytes(prompt)))
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
            folder.expand(path), f"no prompt fits into dialogue.prompt_tokens = {limit}; the longest has {longest}"
        )
    return problems
