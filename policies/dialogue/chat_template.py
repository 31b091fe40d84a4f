"""Builds the chat template of a trained model: a Jinja template that renders messages as the run's dialogues.

transformers and SGLang read the template. It has the texts of asterism.policies.dialogue.chat_format: system turn with
the schemas of the tools, instruction before the first question, prefill of each assistant turn, calls and results. It
accepts the messages that asterism.engine.data.dialogue_messages accepts: reasoning in a field or in <think>, null
contents, and calls with or without `function`.

A run encodes a dialogue piece by piece (TextSegment), but a template renders one text. TemplateMarks contains marks
that separate the pieces and prevent special tokens in untrusted text. The exported tokenizer removes the marks
(asterism.engine.export.served_tokenizer).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asterism.policies.dialogue.chat_format import TURN_END, TURN_START, DialogueFormat, build_call_instructions
from asterism.policies.tools.task_description import DEFAULT_SYSTEM

OPENING_TAG = re.compile(r"\s*<(\w+)>\s*")  # a prefill that opens the reasoning
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

# Follows the assignments of `_list_texts` and `_list_marks`. `-` removes blanks between tags, so every text is quoted.
_BODY = r"""
{%- macro join(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro untrusted(content) -%}
  {%- set shown = namespace(text=join(content)) -%}
  {%- for pair in hidden -%}{%- set shown.text = shown.text.replace(pair[0], pair[1]) -%}{%- endfor -%}
  {{ shown.text }}
{%- endmacro -%}
{%- macro schemas() -%}
  {%- for tool in tools or [] -%}
    {%- set function = tool.function if tool.function is defined else tool -%}
    {{ ('' if loop.first else '\n') ~ '{"type": "function", "function": {"name": ' }}
    {{- function.name | tojson(ensure_ascii=true) ~ ', "description": ' }}
    {{- (function.description or '') | tojson(ensure_ascii=true) ~ ', "parameters": ' }}
    {{- (function.parameters or no_parameters) | tojson(ensure_ascii=true) ~ '}}' }}
  {%- endfor -%}
{%- endmacro -%}
{%- macro call_text(call) -%}
  {%- set function = call.function if call.function is defined else call -%}
  CALL_TEMPLATE
{%- endmacro -%}
{%- macro turn_text(message) -%}
  {%- set turn = namespace(text=join(message.content), thought=none) -%}
  {%- for name in ['thinking', 'reasoning', 'reasoning_content'] if message[name] is string -%}
    {%- set turn.thought = message[name] -%}
  {%- endfor -%}
  {%- if turn.thought is none and thought_open and not turn.text.startswith(prefill) -%}
    {%- set content = turn.text.lstrip() -%}
    {%- if content.startswith('<think>') and '</think>' in content -%}
      {#- The reasoning has the tags of another model. -#}
      {%- set turn.thought = content[7:].split('</think>')[0] -%}
      {%- set turn.text = content[7:].split('</think>', 1)[1].lstrip() -%}
    {%- elif thought_open in content or thought_close not in content -%}
      {#- There is no reasoning. Else the content continues the prefill. -#}
      {%- set turn.thought = '' -%}
    {%- endif -%}
  {%- endif -%}
  {%- if turn.thought is not none and thought_open -%}
    {#- The prefill opens the reasoning. -#}
    {%- set turn.text = turn.thought ~ thought_close ~ ('\n' if turn.text else '') ~ turn.text -%}
  {%- else -%}
    {%- if turn.thought is not none -%}
      {#- The tags are a part of the text. -#}
      {%- set turn.text = '<think>' ~ turn.thought ~ '</think>\n' ~ turn.text -%}
    {%- endif -%}
    {%- if turn.text.startswith(prefill) -%}
      {#- The template has written the prefill. -#}
      {%- set turn.text = turn.text[prefill | length:] -%}
    {%- endif -%}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {%- set separator = '' if prefill ~ turn.text == '' or turn.text.endswith('\n') else '\n' -%}
    {%- set turn.text = turn.text ~ separator ~ call_text(call) -%}
  {%- endfor -%}
  {{ turn.text }}
{%- endmacro -%}
{%- set chat = namespace(separator='', has_question=false, has_calls=false) -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' or message.tool_calls or message.role == 'assistant' and CALL_OPENING in join(message.content) -%}
    {%- set chat.has_calls = true -%}
  {%- endif -%}
{%- endfor -%}
{%- set system = trained_system -%}
{%- set own_system = join(messages[0].content) if messages and messages[0].role in ['system', 'developer'] else '' -%}
{%- set own_schemas = schemas() -%}
{%- if own_system not in ['', trained_system] or own_schemas not in ['', trained_schemas] -%}
  {%- set system = own_system or default_system -%}
  {%- set listed = own_schemas or (trained_schemas if chat.has_calls else '') -%}
  {%- if listed and '<tools>' not in system -%}
    {%- set system = system ~ '\n\n' ~ calls_before ~ listed ~ calls_after -%}
  {%- endif -%}
  {%- set instruction = '' -%}
{%- endif -%}
{%- if system -%}{{ turn_start ~ 'system\n' ~ system ~ turn_end ~ '\n' }}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role in ['system', 'developer'] -%}
    {%- if not loop.first -%}{{ raise_exception('a system message must be the first message') }}{%- endif -%}
  {%- elif message.role == 'user' -%}
    {{ chat.separator ~ turn_start ~ 'user\n' }}
    {%- if chat.has_question -%}{{ after_user ~ untrusted(message.content) }}
    {%- else -%}
      {%- set question = join(message.content) -%}
      {%- set start = instruction | length if question.startswith(instruction) else 0 -%}
      {{ instruction ~ (after_instruction if instruction else after_user) ~ untrusted(question[start:]) }}
    {%- endif -%}
    {{ turn_end ~ '\n' }}
    {%- set chat.separator = '' -%}
    {%- set chat.has_question = true -%}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
      {{ chat.separator ~ turn_start ~ 'user\n' ~ before_results }}
    {%- else -%}{{ between_results ~ '\n' }}{%- endif -%}
    {{ '<tool_response>\n' ~ before_result ~ untrusted(message.content) ~ after_result ~ '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ turn_end ~ '\n' }}{%- endif -%}
    {%- set chat.separator = '' -%}
  {%- elif message.role == 'assistant' -%}
    {{ chat.separator ~ turn_start ~ 'assistant\n' ~ prefill ~ after_prefill ~ turn_text(message) ~ turn_end }}
    {%- set chat.separator = turn_separator -%}
  {%- else -%}{{ raise_exception('unknown role: ' ~ message.role) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ chat.separator ~ turn_start ~ 'assistant\n' ~ prefill }}{%- endif -%}
"""

_ADD_INSTRUCTION = r"""
{%- set first = namespace(place=none) -%}
{%- for message in messages if message.role == 'user' and first.place is none -%}
  {%- set first.place = messages.index(message) -%}
{%- endfor -%}
{%- set asked = messages[first.place].content if first.place is not none else instruction -%}
{%- if asked is not string or not asked.startswith(instruction) -%}
  {%- set parts = [{'type': 'text', 'text': instruction}] -%}
  {%- set question = dict(messages[first.place], content=instruction ~ asked if asked is string else parts + (asked or []) | list) -%}
  {%- set messages = messages[:first.place] + [question] + messages[first.place + 1:] -%}
{%- endif -%}"""

_FAMILY_MARK = "{#- The template of the model's family follows. -#}"


class TemplateMarks(NamedTuple):
    """Marks of a template. `between(before, after)`: the mark of two pieces, or ""; a message is the piece ""."""

    between: Callable[[str, str], str]
    hidden: Sequence[tuple[str, str]]  # replacements in untrusted text


def build_chat_template(dialogue: DialogueFormat, marks: TemplateMarks) -> str:
    """Build the template of a ChatML run. Without another system message and other tools, it renders the run's prompt.
    Otherwise it renders a cold-start row with its own system text or tools: the instructions for calls follow the text,
    and no instruction precedes the question."""
    texts = {name: _quote(text) for name, text in _list_texts(dialogue).items()}
    texts |= {name: json.dumps(mark) for name, mark in _list_marks(dialogue, marks.between).items()}
    assignments = [f"{{%- set {name} = {text} -%}}" for name, text in texts.items()]
    pairs = ", ".join(f"[{_quote(old)}, {json.dumps(new)}]" for old, new in marks.hidden)
    body = _BODY.replace("CALL_TEMPLATE", dialogue.calls.template).replace(
        "CALL_OPENING", f"'{dialogue.calls.opening}'"
    )
    assignments.append(f"{{%- set no_parameters = {_to_literal(_NO_PARAMETERS)} -%}}")
    return "\n".join(assignments) + f"\n{{%- set hidden = [{pairs}] -%}}" + body


def build_family_template(dialogue: DialogueFormat, template: str, parameters: Mapping[str, Any]) -> str:
    """Return the family's template with the system text, the instruction and the tools of the run.

    `parameters`: the renderer's parameters; the template's parameters have the same names.
    """
    original = template.rpartition(_FAMILY_MARK)[2]  # drops the defaults of an earlier export
    return "\n".join([*_list_family_defaults(dialogue, parameters), _FAMILY_MARK + original])


def _list_family_defaults(dialogue: DialogueFormat, parameters: Mapping[str, Any]) -> Iterator[str]:
    for name, value in parameters.items():
        yield f"{{%- if {name} is not defined -%}}{{%- set {name} = {_to_literal(value)} -%}}{{%- endif -%}}"
    if dialogue.tools:
        tools = [json.loads(tool.to_json()) for tool in dialogue.tools]
        yield f"{{%- if not tools -%}}{{%- set tools = {_to_literal(tools)} -%}}{{%- endif -%}}"
    if dialogue.instruction:
        yield f"{{%- set instruction = {_quote(dialogue.instruction)} -%}}{_ADD_INSTRUCTION}"
    if dialogue.system:
        message = _to_literal({"role": "system", "content": dialogue.system})
        yield (
            "{%- if messages and messages[0].role not in ['system', 'developer'] -%}"
            f"{{%- set messages = [{message}] + messages -%}}{{%- endif -%}}"
        )


def _list_texts(dialogue: DialogueFormat) -> dict[str, str]:
    calls_before, _, calls_after = build_call_instructions("{tools}", dialogue.calls).partition("{tools}")
    tag = OPENING_TAG.fullmatch(dialogue.prefill)
    return {
        "turn_start": TURN_START,
        "turn_end": TURN_END,
        "trained_system": dialogue.system,
        "trained_schemas": "\n".join(tool.to_json() for tool in dialogue.tools),
        "default_system": DEFAULT_SYSTEM,
        "calls_before": calls_before,
        "calls_after": calls_after,
        "instruction": dialogue.instruction,
        "prefill": dialogue.prefill,
        "thought_open": f"<{tag[1]}>" if tag else "",
        "thought_close": f"</{tag[1]}>" if tag else "",
        "turn_separator": dialogue.turn_separator,
    }


def _list_marks(dialogue: DialogueFormat, between: Callable[[str, str], str]) -> dict[str, str]:
    user, opening, closing = f"{TURN_START}user\n", "<tool_response>\n", "\n</tool_response>"
    return {
        "after_instruction": between(user + dialogue.instruction, ""),
        "after_user": between(user, ""),
        "before_results": between(user, opening),
        "before_result": between(opening, ""),
        "after_result": between("", closing),
        "between_results": between(closing, f"\n{opening}"),
        "after_prefill": between(f"{TURN_START}assistant\n{dialogue.prefill}", ""),
    }


def _quote(value: str | float) -> str:
    """Return a Jinja literal. Jinja reads the escapes of JSON except for surrogate pairs."""
    return json.dumps(value, ensure_ascii=False)


def _to_literal(value: Any) -> str:
    """Return a Jinja literal of a JSON value."""
    match value:
        case dict():
            return "{" + ", ".join(f"{_quote(key)}: {_to_literal(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_to_literal, value)) + "]"
        case None:
            return "none"
        case _:
            return _quote(value)
