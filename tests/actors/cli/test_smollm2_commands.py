"""`asterism data render` and `asterism chat` use a real model as transformers does, with the template of the model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.actors.cli.invoking import read_output
from tests.engine.data.cold_start_rows import write_rows
from tests.engine.export.exported_chats import render
from tests.engine.export.smollm2 import SYSTEM, fetch_smollm2

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
QUESTIONS = ("What is the capital of France?", "And of Italy?")
CITIES = ("Paris", "Rome")
NEW_TOKENS = 48
CONFIG = f"""
name = "real"
model.checkpoint = "{{model}}"
data.train = "{{rows}}"
data.test = "{{rows}}"
sft.data = "{{rows}}"

[dialogue]
tools = []
system = "{SYSTEM}"
instruction = ""
prefill = ""
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a configuration with the texts of the model's template."""
    path = tmp_path / "real.toml"
    path.write_text(CONFIG.format(model=fetch_smollm2(), rows=tmp_path / "rows.jsonl"))
    return path


def test_smollm2_rows_are_rendered_with_the_tokens_of_its_template(config: Path) -> None:
    """The output has the text of each part, its number of tokens, and the ids of its first tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(fetch_smollm2())
    messages = [{"role": "user", "content": "What is 12 * 7?"}, {"role": "assistant", "content": "x =  84\n\n84"}]
    write_rows(config.with_name("rows.jsonl"), {"messages": messages})
    prompt = render(tokenizer, messages[:1], add_generation_prompt=True)
    turn = render(tokenizer, messages)[len(prompt) : -1]  # without the line break at the end
    shown = read_output("data", "render", config, "--source", "sft")
    parts = re.findall(r"^-- (\w+), (\d+) tokens: ([\d ]+?)(?: \.\.\.)?\n", shown, re.MULTILINE)
    assert [(kind, int(count)) for kind, count, _ in parts] == [("context", len(prompt)), ("trained", len(turn))]
    assert [ids for *_, ids in parts] == [" ".join(map(str, each[:16])) for each in (prompt, turn)]
    assert all(f"\n{tokenizer.decode(each)}\n" in shown for each in (prompt, turn))


def test_a_chat_with_smollm2_has_the_greedy_answers_of_transformers(config: Path, tmp_path: Path) -> None:
    transcript = tmp_path / "chat.jsonl"
    options = ("--config", config, "--temperature", "0", "--max-tokens", NEW_TOKENS, "--transcript", transcript)
    read_output("chat", fetch_smollm2(), *options, typed="".join(f"{question}\n" for question in QUESTIONS))
    system, *turns = json.loads(transcript.read_text())["messages"]
    assert system == {"role": "system", "content": SYSTEM}
    assert turns == list_greedy_turns()
    for answer, city in zip(turns[1::2], CITIES, strict=True):
        assert city in answer["content"]


def list_greedy_turns() -> list[dict[str, str]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(fetch_smollm2())
    model: Any = AutoModelForCausalLM.from_pretrained(fetch_smollm2(), dtype=torch.float32)
    turns: list[dict[str, str]] = []
    for question in QUESTIONS:
        turns.append({"role": "user", "content": question})
        prompt = torch.tensor([render(tokenizer, turns, add_generation_prompt=True)])
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        answer = tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True)
        turns.append({"role": "assistant", "content": answer})
    return turns
