"""Writes the files with which other programs chat with a trained model as the run did: tokenizer, chat template,
generation config, and `asterism.json`, which `asterism serve` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.task_inputs import build_renderer, read_task_descriptions
from asterism.engine.export.origin import read_optional_struct
from asterism.engine.export.served_tokenizer import (
    BOUNDARY_LITERAL,
    CLASS_CODE,
    CLASS_FILE,
    build_served_tokenizer,
    build_tokenizer_config,
    find_marks,
)
from asterism.engine.hf.family_renderer import FamilyRenderer
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.hf.weight_files import read_json_object
from asterism.policies.dialogue.chat_format import PROTOCOL_TAGS, TURN_END, DialogueFormat
from asterism.policies.dialogue.chat_template import OPENING_TAG, build_chat_template, build_family_template
from asterism.policies.tools.task_description import TaskDescription

SERVING_FILE = "asterism.json"
_STALE_FILES = ("special_tokens_map.json", "added_tokens.json")  # tokenizer.json has the content of these files


class ChatParsers(NamedTuple):
    """Names of SGLang's parsers; empty: no parser fits."""

    calls: str = ""
    reasoning: str = ""


_FAMILY_PARSERS: Mapping[str, ChatParsers] = {  # parsers by renderer
    "qwen3": ChatParsers("qwen25", "qwen3"),
    "prime-qwen3": ChatParsers("qwen25", "qwen3"),
    "qwen3-vl": ChatParsers("qwen25", "qwen3"),
    "qwen3.5": ChatParsers("qwen3_coder", "qwen3"),
    "qwen3.6": ChatParsers("qwen3_coder", "qwen3"),
    "glm-4.5": ChatParsers("glm45", "glm45"),
    "kimi-k2": ChatParsers("kimi_k2"),
    "llama-3": ChatParsers("llama3"),
    "deepseek-v3": ChatParsers("deepseekv3", "deepseek-v3"),
    "deepseek-r1": ChatParsers("deepseekv3", "deepseek-r1"),
    "minimax-m2": ChatParsers("minimax-m2", "minimax"),
    "gpt-oss": ChatParsers("gpt-oss", "gpt-oss"),
}


class ServingFacts(msgspec.Struct, frozen=True):
    """The content of `asterism.json`."""

    tool_call_parser: str  # SGLang's name of the parser; empty: no tools, or no parser fits the format
    reasoning_parser: str  # SGLang's name of the parser; empty: no parser fits
    context_tokens: int  # tokens of the run's longest dialogue
    tools: list[dict[str, Any]]  # JSON schemas, as in a request


class ServedChat(NamedTuple):
    template: str
    tokenizer: Mapping[str, Any] | None  # content of tokenizer.json; None: unchanged
    tokenizer_config: Mapping[str, Any]
    generation: Mapping[str, Any]
    facts: ServingFacts


def build_served_chat(run: RunConfig, task: TaskConfig, description: TaskDescription, source: Path) -> ServedChat:
    """Build the files of a task's chat. `source`: the tokenizer's folder, with config.json. Raises UnusableInput."""
    model_type = read_json_object(source / "config.json").get("model_type", "")
    tokenizer, config = load_tokenizer(source), task.get_dialogue()
    renderer = build_renderer(config, description, tokenizer)
    dialogue, stop_ids = renderer.dialogue, list(renderer.stop_token_ids)
    parsers = _choose_parsers(config, dialogue)
    facts = ServingFacts(
        tool_call_parser=parsers.calls,
        reasoning_parser=parsers.reasoning,
        context_tokens=config.prompt_tokens + max(config.response_tokens, run.limit_evaluated_response(task)),
        tools=[json.loads(tool.to_json()) for tool in dialogue.tools],
    )
    generation = _build_generation_config(run, task, stop_ids, tokenizer.vocab_size)
    if isinstance(renderer, FamilyRenderer):
        original, parameters = _read_family_template(source), renderer.template_parameters
        if not _has_reasoning(facts.reasoning_parser, original, parameters):
            facts = msgspec.structs.replace(facts, reasoning_parser="")
        template = build_family_template(dialogue, original, parameters)
        return ServedChat(template, None, _read_tokenizer_config(source), generation, facts)
    fields = read_json_object(tokenizer.path)
    template = build_chat_template(dialogue, find_marks(tokenizer, fields))
    visible = _list_visible_tags(dialogue)
    served = build_served_tokenizer(fields, visible, has_boundaries=BOUNDARY_LITERAL in template)
    return ServedChat(
        template, served, build_tokenizer_config(source, model_type, visible, TURN_END), generation, facts
    )


def build_checkpoint_chat(run: RunConfig, folder: RunFolder, source: Path) -> ServedChat | None:
    """Build the files of the first task's chat, or return None with a renderer: a checkpoint keeps the files of the
    initial model, which can lack a template. Raises UnusableInput."""
    task = run.resolved_tasks[0]
    if task.get_dialogue().renderer:
        return None
    return build_served_chat(run, task, read_task_descriptions(folder)[task.name], source)


def write_chat_files(folder: Path, chat: ServedChat) -> None:
    """Write into a transformers folder that has config.json and the tokenizer's files. Raises OSError."""
    if chat.tokenizer is not None:
        _write_json(folder / "tokenizer.json", chat.tokenizer, indent=None)
        for name in _STALE_FILES:
            (folder / name).unlink(missing_ok=True)
    _write_json(folder / "tokenizer_config.json", chat.tokenizer_config)
    if "auto_map" in chat.tokenizer_config:
        (folder / CLASS_FILE).write_text(CLASS_CODE, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat.template, encoding="utf-8")
    config, generation = read_json_object(folder / "config.json"), dict(chat.generation)
    _write_json(folder / "config.json", {**config, "eos_token_id": generation["eos_token_id"]})
    kept = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    _write_json(folder / "generation_config.json", {**kept, **generation})
    (folder / SERVING_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(chat.facts)))


def read_serving_facts(folder: Path) -> ServingFacts | None:
    """Return the facts, or None without the file of `asterism export`. Raises UnusableInput for a broken file."""
    return read_optional_struct(folder / SERVING_FILE, ServingFacts)


def _choose_parsers(config: DialogueConfig, dialogue: DialogueFormat) -> ChatParsers:
    """Choose parsers. Without a prefill in <think> no parser of SGLang fits the reasoning of ChatML runs."""
    if config.renderer:
        parsers = _FAMILY_PARSERS.get(config.renderer, ChatParsers())
    else:
        tag = OPENING_TAG.fullmatch(dialogue.prefill)
        parsers = ChatParsers(dialogue.calls.sglang_parser, "deepseek-r1" if tag and tag[1] == "think" else "")
    return parsers if dialogue.tools else parsers._replace(calls="")


def _has_reasoning(parser: str, template: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether responses have reasoning. A parser would treat all text without `</think>` as reasoning."""
    if False in (parameters.get("enable_thinking"), parameters.get("thinking")):
        return False
    return parser == "gpt-oss" or "<think>" in template


def _build_generation_config(run: RunConfig, task: TaskConfig, stop_ids: list[int], vocab_size: int) -> dict[str, Any]:
    """Return the sampling and the limits of the run's evaluations.

    `top_k` is explicit even for all tokens: without it transformers uses 50, and SGLang refuses 0. Greedy sampling
    has no `do_sample`, with which transformers refuses a temperature of 0.
    """
    sampling = run.evaluation_sampling
    return {
        "do_sample": sampling.temperature > 0,
        **msgspec.structs.asdict(sampling),
        "top_k": sampling.top_k or vocab_size,
        "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0],
        "max_new_tokens": run.limit_evaluated_response(task),
    }


def _list_visible_tags(dialogue: DialogueFormat) -> list[str]:
    calls = dialogue.calls.opening, dialogue.calls.closing
    return [*PROTOCOL_TAGS, *calls, "<think>", "</think>", dialogue.answer_open, dialogue.answer_close]


def _read_tokenizer_config(source: Path) -> dict[str, Any]:
    path = source / "tokenizer_config.json"
    return {key: value for key, value in read_json_object(path).items() if key != "chat_template"}


def _read_family_template(source: Path) -> str:
    """Read the tokenizer's template. Raises UnusableInput if there is none."""
    file, config = source / "chat_template.jinja", source / "tokenizer_config.json"
    if file.exists():
        check_file(file)
        return file.read_text(encoding="utf-8")
    found = read_json_object(config).get("chat_template") if config.exists() else None
    if isinstance(found, list):  # several templates, each with a name
        named = {each["name"]: each["template"] for each in cast(list[dict[str, str]], found)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UnusableInput(
            f"{source}: has no chat template, which an export of a run with dialogue.renderer needs; "
            f"add the template of the model's family as {file.name}"
        )
    return found


def _write_json(path: Path, content: Mapping[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
