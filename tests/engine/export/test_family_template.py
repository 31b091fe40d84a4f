"""Tests: runs with dialogue.renderer export the template of the model's family, with the run's texts as defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from asterism.configs.errors import UnusableInput
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.data.task_inputs import build_renderer
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.tasks import MATH_PYTHON
from tests.engine.export import family_runs
from tests.engine.export.exported_chats import build_chat, export
from tests.engine.export.family_folders import FAMILY_KINDS, NIGHTLY_SMOLLM2, write_family_tokenizer
from tests.engine.export.family_templates import QWEN3_TEMPLATE

CONFIGS = {
    **family_runs.CONFIGS,
    "own texts": DialogueConfig(tools=(), renderer="qwen3", system="Be 'brief' \u2603.", instruction=""),
    "no tools": DialogueConfig(tools=(), renderer="llama-3", renderer_parameters={"date_string": "01 Feb 2027"}),
}
QWEN3 = FAMILY_KINDS["qwen3"]
PARSERS = {"qwen3": ("qwen25", "qwen3"), "llama-3": ("llama3", "")}
QUESTION = {"role": "user", "content": "1 + 1?"}


def replace_template(folder: Path, template: str | None) -> Path:
    path = folder / "tokenizer_config.json"
    fields: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "chat_template": template}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_exported_template_renders_the_prompt_of_the_run(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    source = write_family_tokenizer(tmp_path, FAMILY_KINDS[config.renderer.replace("-", "")])
    wanted = build_renderer(config, MATH_PYTHON, load_tokenizer(source)).render_prompt(QUESTION["content"])
    chat = build_chat(source, config)
    tokenizer = export(source, chat)
    assert tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=False) == wanted
    assert build_chat(source, config).template == chat.template  # a second export changes nothing
    thinking = tokenizer.apply_chat_template(
        [QUESTION], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert "<think>" not in thinking
    calls, reasoning = PARSERS[config.renderer]
    reasoning = "" if name == "qwen3 quick" else reasoning  # SGLang's parser would treat the whole answer as reasoning
    assert (chat.facts.tool_call_parser, chat.facts.reasoning_parser) == (calls if config.tools else "", reasoning)


def test_texts_of_a_request_replace_the_texts_of_the_run(tmp_path: Path) -> None:
    source = write_family_tokenizer(tmp_path, QWEN3)
    tokenizer = export(source, build_chat(source, CONFIGS["qwen3"]))
    tool = {"type": "function", "function": {"name": "look_up"}}
    system = {"role": "system", "content": "Mine."}
    text = tokenizer.apply_chat_template([system, QUESTION], tools=[tool], tokenize=False)
    assert "Mine." in text and "look_up" in text
    assert "jupyter_code" not in text and "helpful" not in text


def test_a_question_of_several_parts_gets_the_instruction(tmp_path: Path) -> None:
    chat = build_chat(write_family_tokenizer(tmp_path, QWEN3), CONFIGS["qwen3"])
    template = chat.template.replace(QWEN3_TEMPLATE, "{{ messages | tojson }}")
    assert template != chat.template
    tokenizer = export(tmp_path, chat._replace(template=template))
    parts = [{"type": "text", "text": "1 + 1?"}]
    system, question = json.loads(tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False))
    assert system["role"] == "system"
    instruction = build_dialogue_format(CONFIGS["qwen3"], MATH_PYTHON).instruction
    assert [part["text"] for part in question["content"]] == [instruction, "1 + 1?"]
    developer = {"role": "developer", "content": "Mine."}
    assert json.loads(tokenizer.apply_chat_template([developer, QUESTION], tokenize=False))[0] == developer


def test_an_instruct_model_of_a_thinking_family_needs_no_reasoning_parser(tmp_path: Path) -> None:
    """The template of Qwen3-4B-Instruct-2507 contains no <think>."""
    template = QWEN3_TEMPLATE.replace("<think>", "").replace("</think>", "")
    source = replace_template(write_family_tokenizer(tmp_path, QWEN3), template)
    assert build_chat(source, CONFIGS["qwen3"]).facts.reasoning_parser == ""


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"has no chat template.*add the template of the model's family"):
        build_chat(replace_template(write_family_tokenizer(tmp_path, QWEN3), None), CONFIGS["qwen3"])


@pytest.mark.parametrize("renderer", ["qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3-vl"])
@pytest.mark.parametrize("family", ["qwen2.5", NIGHTLY_SMOLLM2])
def test_no_renderer_of_qwen_fits_a_tokenizer_with_only_the_roles_of_chatml(
    tmp_path: Path, family: str, renderer: str
) -> None:
    """Qwen2.5 has no tokens for reasoning and results, and SmolLM2 none for calls: a run has the roles and tags of
    ChatML."""
    config = DialogueConfig(tools=("jupyter_code",), renderer=renderer)
    with pytest.raises(
        UnusableInput, match=rf"{renderer} does not fit .*'<(think|tool_call|tool_response)>' not found"
    ):
        build_chat(write_family_tokenizer(tmp_path, FAMILY_KINDS[family]), config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5", NIGHTLY_SMOLLM2])
def test_an_export_without_a_renderer_replaces_the_template_of_the_family(tmp_path: Path, family: str) -> None:
    source = write_family_tokenizer(tmp_path, FAMILY_KINDS[family])
    before: Any = AutoTokenizer.from_pretrained(source)
    name = "You are Qwen" if family == "qwen2.5" else "named SmolLM"
    assert name in before.apply_chat_template([QUESTION], tokenize=False)
    after = export(source, build_chat(source, DialogueConfig()))
    assert name not in after.apply_chat_template([QUESTION], tokenize=False)
