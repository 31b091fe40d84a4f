"""Runs with dialogue.renderer export the template of the model's family, with the texts of the run as its defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.dialogue_options import DialogueConfig
from configs.errors import UnusableInput
from configs.schema import RunConfig
from engine.chat.chat_files import ServedChat, build_served_chat, write_chat_files
from engine.data.task_inputs import build_renderer
from engine.model.tokenizer import load_tokenizer
from tasks import MATH_PYTHON
from tests.engine.chat.family_folders import FAMILY_KINDS, write_family_tokenizer

# The prompts of Qwen3, with its texts.
QWEN3_TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{ '<|im_start|>system\n' ~ (system ~ '\n\n' if system else '') ~ '# Tools\n\nYou may call one or more functions to assist '
   ~ 'with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools -%}{{ '\n' ~ (tool | tojson) }}{%- endfor -%}
{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call>'
   ~ '</tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif system -%}{{ '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' ~ ('<think>\n\n</think>\n\n' if enable_thinking is false else '') }}
{%- endif -%}
"""
# The prompts of Llama 3.2, with its texts and its date of today.
LLAMA3_TEMPLATE = r"""
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- set call = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
   ~ 'Do not use variables.\n\n' -%}
{{ bos_token ~ '<|start_header_id|>system<|end_header_id|>\n\n' ~ ('Environment: ipython\n' if tools else '')
   ~ 'Cutting Knowledge Date: December 2023\nToday Date: ' ~ date ~ '\n\n' ~ system ~ '<|eot_id|>' }}
{%- for message in messages if message.role != 'system' -%}
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' }}
{%- if tools and loop.first -%}
{{ 'Given the following functions, please respond with a JSON for a function call with its proper arguments that best '
   ~ 'answers the given prompt.\n\n' ~ call }}
{%- for tool in tools -%}{{ (tool | tojson(indent=4)) ~ '\n\n' }}{%- endfor -%}
{%- endif -%}
{{ (message.content | trim) ~ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""
TEMPLATES = {"qwen3": QWEN3_TEMPLATE, "llama-3": LLAMA3_TEMPLATE}
CONFIGS = {
    "default": DialogueConfig(tools=("jupyter_code",), renderer="qwen3"),
    "quick": DialogueConfig(
        tools=("jupyter_code",), renderer="qwen3", system="", renderer_parameters={"enable_thinking": False}
    ),
    "own texts": DialogueConfig(tools=(), renderer="qwen3", system="Be 'brief' \u2603.", instruction=""),
    "llama": DialogueConfig(tools=("jupyter_code",), renderer="llama-3"),
    "llama later": DialogueConfig(tools=(), renderer="llama-3", renderer_parameters={"date_string": "01 Feb 2027"}),
}
PARSERS = {"qwen3": ("qwen25", "qwen3"), "llama-3": ("llama3", "")}
QUESTION = {"role": "user", "content": "1 + 1?"}


def write_source(folder: Path, template: str | None, family: str = "qwen3") -> Path:
    """The template is in tokenizer_config.json, as in Qwen's folders."""
    kind = FAMILY_KINDS[family]
    write_family_tokenizer(folder, kind)
    path = folder / "tokenizer_config.json"
    fields: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "chat_template": template}))
    (folder / "config.json").write_text(json.dumps({"model_type": kind.model_type}))
    return folder


def build_chat(folder: Path, config: DialogueConfig) -> ServedChat:
    run = RunConfig(name="r", dialogue=config)
    return build_served_chat(run, run.resolved_tasks[0], MATH_PYTHON, folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_prompt_is_that_of_the_run(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    source = write_source(tmp_path, TEMPLATES[config.renderer], config.renderer.replace("-", ""))
    wanted = build_renderer(config, MATH_PYTHON, load_tokenizer(source)).render_prompt(QUESTION["content"])
    chat = build_chat(source, config)
    write_chat_files(source, chat)
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    assert tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=False) == wanted
    assert build_chat(source, config).template == chat.template  # of an export of the export
    thinking = tokenizer.apply_chat_template(
        [QUESTION], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert "<think>" not in thinking
    calls, reasoning = PARSERS[config.renderer]
    reasoning = "" if name == "quick" else reasoning  # SGLang's parser would take a whole answer for reasoning
    assert (chat.facts.tool_call_parser, chat.facts.reasoning_parser) == (calls if config.tools else "", reasoning)


def test_texts_of_a_request_replace_those_of_the_run(tmp_path: Path) -> None:
    source = write_source(tmp_path, QWEN3_TEMPLATE)
    write_chat_files(source, build_chat(source, CONFIGS["default"]))
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tool = {"type": "function", "function": {"name": "look_up"}}
    system = {"role": "system", "content": "Mine."}
    text = tokenizer.apply_chat_template([system, QUESTION], tools=[tool], tokenize=False)
    assert "Mine." in text and "look_up" in text
    assert "jupyter_code" not in text and "helpful" not in text


def test_an_instruct_model_of_a_thinking_family_needs_no_reasoning_parser(tmp_path: Path) -> None:
    """As Qwen3-4B-Instruct-2507: its template opens no <think>."""
    source = write_source(tmp_path, QWEN3_TEMPLATE.replace("<think>", "").replace("</think>", ""))
    assert build_chat(source, CONFIGS["default"]).facts.reasoning_parser == ""


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"has no chat template.*add the template of the model's family"):
        build_chat(write_source(tmp_path, None), CONFIGS["default"])
