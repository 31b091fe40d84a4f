"""Runs with dialogue.renderer and random dialogues: the tokens that a run trains on, and the exported template.

In a run, the tokens of each turn remain in the prompts of later turns. The template of Qwen3 renders each request again,
without the reasoning before the last question, and without empty reasoning of earlier turns.
"""

import json
import random
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

from pydantic import TypeAdapter
from renderers import create_renderer
from renderers.configs import RendererConfig

from asterism.bus.messages import build_blank_record, bytes_to_ids, ids_to_bytes
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.data.task_inputs import build_renderer
from asterism.engine.hf.family_renderer import FamilyTokenizer
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.policies.dialogue.dialogue_renderer import DialogueRenderer
from asterism.policies.dialogue.parse_turn import ToolCall
from asterism.tasks import MATH_PYTHON
from tests.engine.export.exported_chats import export_chat
from tests.engine.export.family_folders import FAMILY_KINDS, write_family_tokenizer
from tests.engine.export.random_dialogues import Message, make_text
from tests.fakes import generated_ids

TOOL = "jupyter_code"
EMPTY_REASONING = "<think>\n\n</think>\n\n"
CONFIGS = {
    "qwen3": DialogueConfig(tools=(TOOL,), renderer="qwen3"),
    "qwen3 quick": DialogueConfig(
        tools=(TOOL,), renderer="qwen3", system="", renderer_parameters={"enable_thinking": False}
    ),
    "llama3": DialogueConfig(tools=(TOOL,), renderer="llama-3"),
    "llama3 later": DialogueConfig(
        tools=(TOOL,),
        renderer="llama-3",
        instruction="",
        renderer_parameters={"date_string": "01 Feb 2027", "tools_in_user_message": False},
    ),
}


class TrainedTurn(NamedTuple):
    """A turn of the assistant in the tokens of a run."""

    place: int  # index of the message
    start: int  # position of the turn's first token
    end: int
    question: int  # position at which the turn with the last question starts


class FamilyRun(NamedTuple):
    renderer: DialogueRenderer
    tokenizer: FastTokenizer
    exported: Any
    package: Any  # renderer of the package, which renders whole dialogues with the family's template
    thinks: bool  # whether the model writes reasoning in the format of Qwen3
    is_quick: bool  # whether each prompt ends with empty reasoning
    is_llama: bool

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, trusted=True)

    def train(self, messages: list[Message]) -> tuple[list[int], list[TrainedTurn]]:
        """Return the dialogue's tokens in a run, where a model generates the turns of the assistant."""
        record = build_blank_record(ids_to_bytes(self.renderer.render_prompt(messages[0]["content"])))
        place, question = 1, 0
        turns: list[TrainedTurn] = []
        for role, group in groupby(messages[1:], key=lambda message: message["role"]):
            contents = [message["content"] for message in group]
            if role == "assistant":
                start = len(record.token_ids) // 4
                turn = self.encode(self.write_turn(messages[place]))
                record = record.append_generated(generated_ids(0, len(turns), turn, "stop", 3, 1))
                turns.append(TrainedTurn(place, start, start + len(turn), question))
                self.check_parsed(record.token_ids, start, messages[place])
            else:
                question = len(record.token_ids) // 4 if role == "user" else question
                added = (
                    self.renderer.render_user_turn(record, contents[0])
                    if role == "user"
                    else self.renderer.render_tool_turn(record, contents)
                )
                assert added is not None
                record = record.append_observation(added)
            place += len(contents)
        return list(bytes_to_ids(record.token_ids)), turns

    def write_turn(self, message: Message) -> str:
        """Return the text that a model of the family generates for this message."""
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if self.is_llama:
            called = [f'{{"name": "{TOOL}", "parameters": {dump(call["arguments"])}}}' for call in calls]
            return "".join(called or [message["content"]]) + "<|eot_id|>"
        reasoning = message.get("reasoning_content")
        text = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        called = [
            f'<tool_call>\n{{"name": "{TOOL}", "arguments": {dump(call["arguments"])}}}\n</tool_call>' for call in calls
        ]
        return text + "\n".join(filter(None, [message["content"], *called])) + "<|im_end|>"

    def check_parsed(self, token_ids: bytes, start: int, message: Message) -> None:
        """Check that the run parses the same calls from the tokens. Tokenizers of Qwen compose characters."""
        parsed = self.renderer.parse_turn(token_ids, start).calls
        given = [ToolCall(TOOL, call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert [normalize("NFC", repr(call)) for call in parsed] == [normalize("NFC", repr(call)) for call in given]

    def drop_reasoning(self, token_ids: list[int], before: int) -> list[int]:
        """Remove all reasoning that starts before this position, and the empty line after it."""
        if self.is_llama:
            return token_ids
        opening, closing = (self.tokenizer.get_token_id(tag) for tag in ("<think>", "</think>"))
        empty_line = self.encode("\n\n")
        kept, at = [], 0
        while at < len(token_ids):
            if token_ids[at] == opening and at < before:
                at = token_ids.index(closing, at) + 1
                assert token_ids[at : at + len(empty_line)] == empty_line
                at += len(empty_line)
            else:
                kept.append(token_ids[at])
                at += 1
        return kept

    def expect_prompt(self, trained: list[int], turn: TrainedTurn) -> list[int]:
        """Return the served model's prompt of a turn, which is the run's prompt without the removed reasoning."""
        prompt = trained[: turn.start]
        if self.is_quick:  # the empty reasoning at the end of the prompt remains
            return self.drop_reasoning(prompt, turn.start - len(self.encode(EMPTY_REASONING)))
        return self.drop_reasoning(prompt, turn.question)

    def expect_whole(self, trained: list[int], turn: TrainedTurn, message: Message) -> list[int]:
        """Return the dialogue. Qwen3's template adds empty reasoning to a last turn, and a line break to each turn."""
        has_reasoning = self.is_llama or self.is_quick or "reasoning_content" in message
        added = [] if has_reasoning else self.encode(EMPTY_REASONING)
        return [
            *self.expect_prompt(trained, turn),
            *added,
            *trained[turn.start : turn.end],
            *([] if self.is_llama else self.encode("\n")),
        ]


def dump(arguments: Message) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def make_family_run(folder: Path, name: str) -> FamilyRun:
    config, kind = CONFIGS[name], FAMILY_KINDS[name.split()[0]]
    tokenizer = load_tokenizer(write_family_tokenizer(folder / "source", kind))
    checked = TypeAdapter[Any](RendererConfig).validate_python({"name": config.renderer, **config.renderer_parameters})
    return FamilyRun(
        build_renderer(config, MATH_PYTHON, tokenizer),
        tokenizer,
        export_chat(folder / "exported", kind, config),
        create_renderer(FamilyTokenizer(tokenizer), checked),
        thinks=name == "qwen3",
        is_quick=name == "qwen3 quick",
        is_llama=name.startswith("llama3"),
    )


def make_family_dialogue(run: FamilyRun, seed: int, make: Callable[[random.Random], str]) -> list[Message]:
    """Make a dialogue as a model of the family writes it: texts and reasoning have no line breaks at their ends, and
    with Llama 3 a turn has either one call or a text."""
    draw = random.Random(seed)
    messages: list[Message] = []
    for _ in range(draw.choice((1, 2, 2, 3))):
        messages.append({"role": "user", "content": make(draw)})
        for _ in range(draw.choice((0, 1, 1, 2))):
            codes = [make_text(draw) for _ in range(1 if run.is_llama else draw.choice((1, 1, 2, 3)))]
            content = "" if run.is_llama else draw.choice(("", make_text(draw).strip()))
            calls = [{"type": "function", "function": {"name": TOOL, "arguments": {"code": code}}} for code in codes]
            messages.append({"role": "assistant", "content": content, **think(run, draw), "tool_calls": calls})
            messages += [{"role": "tool", "content": make(draw)} for _ in codes]
        messages.append({"role": "assistant", "content": f"It is {make_text(draw)}".strip(), **think(run, draw)})
    return messages


def think(run: FamilyRun, draw: random.Random) -> Message:
    has_reasoning = run.thinks and draw.random() < 0.7
    return {"reasoning_content": f"I add {make_text(draw)}".strip()} if has_reasoning else {}
