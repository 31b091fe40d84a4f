"""Renders rows as the texts and tokens of a run: `asterism data render`."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.data_files import BadRows
from asterism.engine.data.datasets import make_training_report, read_problems
from asterism.engine.data.sft_dialogues import iter_sft_dialogues
from asterism.engine.data.task_inputs import build_family_dialogues, build_renderer, build_task_formats, get_row_layout
from asterism.engine.data.token_files import fit_length, is_too_long
from asterism.engine.hf.tokenizer import FastTokenizer
from asterism.policies.tools.task_description import TaskDescription, TaskDescriptions

_LEFT_OUT = "without its system text or earlier turns: the prompt has the last text of the user only"


class RenderedPart(NamedTuple):
    text: str
    token_ids: list[int]
    is_trained: bool  # whether the loss of the cold start covers the part


class RenderedRow(NamedTuple):
    name: str  # FILE:ROW
    parts: list[RenderedPart]
    note: str = ""  # the change of the row, if any


def render_questions(
    task: TaskConfig, description: TaskDescription, path: Path, tokenizer: FastTokenizer, max_bad_rows: int
) -> Iterator[RenderedRow]:
    """Render the prompts of rollouts. Raises DatasetError."""
    renderer = build_renderer(task.get_dialogue(), description, tokenizer)
    for problem in read_problems(path, make_training_report(max_bad_rows), layout=get_row_layout(task, description)):
        token_ids = renderer.render_prompt(problem.question)
        note = _LEFT_OUT if problem.was_cut else ""
        yield RenderedRow(problem.name, [RenderedPart(tokenizer.decode(token_ids), token_ids, False)], note)


def render_dialogues(
    run: RunConfig, descriptions: TaskDescriptions, file: SftFileConfig, path: Path, tokenizer: FastTokenizer
) -> Iterator[RenderedRow]:
    """Render the sequences of the cold start from the data at `path`. Raises DatasetError."""
    formats, bad_rows = build_task_formats(run, descriptions), BadRows(run.sft.max_bad_rows, "sft.max_bad_rows")
    families = build_family_dialogues(run, descriptions, tokenizer)
    for dialogue in iter_sft_dialogues(path, tokenizer, formats, file, bad_rows, families):
        trained = fit_length(dialogue, run.sft)
        shown = trained or dialogue
        parts: list[RenderedPart] = []
        for is_trained, tokens in groupby(zip(shown.token_ids, shown.loss_mask, strict=True), key=lambda each: each[1]):
            token_ids = [token_id for token_id, _ in tokens]
            parts.append(RenderedPart(tokenizer.decode(token_ids), token_ids, bool(is_trained)))
        change, length = "truncated" if trained else "dropped", len(dialogue.token_ids)
        note = f"{change}: {length:,} tokens, sft.max_tokens is {run.sft.max_tokens:,}"
        yield RenderedRow(dialogue.name, parts, note if is_too_long(dialogue, run.sft) else "")
