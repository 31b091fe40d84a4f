"""The imported tokenizer and the template of a real model agree with those of a run with the texts of this template."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.hf.tokenizer import load_tokenizer
from tests.engine.export.exported_chats import assert_same_ids, tokenize_rows
from tests.engine.export.family_folders import FAMILY_KINDS
from tests.engine.export.random_dialogues import Message, make_text
from tests.engine.export.smollm2 import SYSTEM, fetch_smollm2

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
OWN_TEXTS = DialogueConfig(system=SYSTEM, instruction="", prefill="", tools=())


def make_plain_dialogue(seed: int) -> list[Message]:
    """Make a dialogue without blanks at the starts of texts: the template merges them with the line break before."""
    draw = random.Random(seed)
    roles = ("user", "assistant") * draw.choice((1, 1, 2, 3))
    return [{"role": role, "content": make_text(draw).lstrip() or "6"} for role in roles]


def test_a_run_with_the_texts_of_the_model_has_the_token_ids_of_its_template(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(fetch_smollm2())
    dialogues = [make_plain_dialogue(seed) for seed in range(100)]
    learned = tokenize_rows(tmp_path, FAMILY_KINDS["smollm2"], OWN_TEXTS, [{"messages": each} for each in dialogues])
    line_break = tokenizer.encode("\n")  # the template ends the last turn with it
    for messages, each in zip(dialogues, learned, strict=True):
        whole = each._replace(token_ids=[*each.token_ids, *line_break], loss_mask=[*each.loss_mask, 0])
        assert_same_ids(tokenizer, messages, None, whole)


def test_the_tokenizer_splits_each_digit_from_the_blanks_before_it() -> None:
    """The GGUF file names this split, which transformers' reader ignores."""
    tokenizer = load_tokenizer(fetch_smollm2())
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("a  12\n\n3", trusted=True)]
    assert pieces == ["a", "  ", "1", "2", "\n\n", "3"]
