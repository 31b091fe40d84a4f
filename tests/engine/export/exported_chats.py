"""Exported folders, and the token ids of a dialogue in a cold start and with the exported chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.sft_dialogues import TokenizedDialogue, iter_sft_dialogues
from asterism.engine.export.chat_files import ServedChat, build_served_chat, write_chat_files
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.tasks import MATH_PYTHON
from tests.engine.export.family_folders import FamilyKind, write_family_tokenizer

OWN_TEXTS = "Use it \u2603.\n{tools}\nEnd."
DIALOGUES = {
    "default": DialogueConfig(),
    "think": DialogueConfig(prefill="<think>\n", instruction=""),
    "plain": DialogueConfig(prefill="", turn_separator="", system=OWN_TEXTS, instruction='Say "\\boxed{}"\n\n'),
    "no system": DialogueConfig(system="", tools=(), prefill="Well: "),
}


def build_chat(folder: Path, dialogue: DialogueConfig = DialogueConfig(), **options: Any) -> ServedChat:  # noqa: B008
    """Build the chat files of the model in this folder. `options`: other tables of the run."""
    run = RunConfig(name="r", dialogue=dialogue, **options)
    return build_served_chat(run, run.resolved_tasks[0], MATH_PYTHON, folder)


def export(folder: Path, chat: ServedChat) -> Any:
    """Write the chat files, and return the tokenizer as transformers loads it."""
    write_chat_files(folder, chat)
    return AutoTokenizer.from_pretrained(folder)


def export_chat(folder: Path, kind: FamilyKind, config: DialogueConfig) -> Any:
    """Export a tokenizer and return it as transformers loads it."""
    write_family_tokenizer(folder, kind)
    return export(folder, build_chat(folder, config))


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **options)


def tokenize_rows(
    folder: Path, kind: FamilyKind, config: DialogueConfig, rows: Sequence[dict[str, Any]]
) -> list[TokenizedDialogue]:
    """Read rows as a cold start does. The prompt is that of the run, or is in the columns of the row."""
    tokenizer = load_tokenizer(write_family_tokenizer(folder / "original", kind))
    path, formats = folder / "rows.jsonl", {"": build_dialogue_format(config, MATH_PYTHON)}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(iter_sft_dialogues(path, tokenizer, formats))


def assert_same_ids(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, learned: TokenizedDialogue) -> None:
    """Compare the ids of the whole dialogue, and the ids of the prompt of each turn."""
    assert render(tokenizer, messages, tools) == learned.token_ids
    mask = learned.loss_mask
    starts = [at for at in range(1, len(mask)) if mask[at - 1 : at + 1] == [0, 1]]
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for at, place in zip(starts, turns, strict=True):
        assert render(tokenizer, messages[:place], tools, add_generation_prompt=True) == learned.token_ids[:at]
