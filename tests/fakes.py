"""Fakes that several tests share."""

import re
from collections.abc import Sequence
from typing import cast

from asterism.analysis.event_logs.describe import TaskTexts, TextContext
from asterism.bus.messages import EvaluationFinished, StartGroup, TaskCounts, TurnGenerated, ids_to_bytes
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.chat_format import (
    PROTOCOL_TAGS,
    TURN_END,
    TURN_START,
    DialogueFormat,
    build_dialogue_format,
)
from asterism.policies.dialogue.dialogue_renderer import ChatMLRenderer
from asterism.policies.rollout.trajectory import Rules
from asterism.tasks.math_python import MATH_PYTHON

TAGS = (TURN_START, TURN_END, *PROTOCOL_TAGS)
_SPLIT = re.compile("(" + "|".join(re.escape(tag) for tag in TAGS) + ")")
_FIRST_TAG = 0x110000  # token id of the first tag: ids below it are code points


class CharTokenizer:
    """A tokenizer with one token per character. A protocol tag in trusted text is one token."""

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        if not trusted:
            return [ord(character) for character in text]
        return [token for part in _SPLIT.split(text) for token in self._part(part)]

    def _part(self, part: str) -> list[int]:
        return [_FIRST_TAG + TAGS.index(part)] if part in TAGS else [ord(character) for character in part]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(TAGS[token - _FIRST_TAG] if token >= _FIRST_TAG else chr(token) for token in token_ids)


TOKENIZER = CharTokenizer()
END = TOKENIZER.encode(TURN_END, trusted=True)[0]

# prompt, tool call and answer of a trajectory
PROMPT = ids_to_bytes(TOKENIZER.encode("question", trusted=False))
CALL = '<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "1"}}\n</tool_call>'
ANSWER = "</reason><answer>\\boxed{2}</answer>"


def rules(**changes: object) -> Rules:
    dialogue = changes.pop("dialogue", None) or build_dialogue_format(DialogueConfig(), MATH_PYTHON)
    settings: dict[str, object] = {
        "renderer": ChatMLRenderer(TOKENIZER, cast(DialogueFormat, dialogue)),
        "response_tokens": 4000,
        "max_turns": 4,
        "max_calls_per_turn": 1,
        "result_characters": 200,
        "stop_token_ids": (END,),
    }
    return Rules(**{**settings, **changes})  # pyright: ignore[reportArgumentType]


def text_context(dialogue: DialogueConfig = DialogueConfig()) -> TextContext:  # noqa: B008 - immutable
    texts = TaskTexts(dialogue, ChatMLRenderer(TOKENIZER, build_dialogue_format(dialogue, MATH_PYTHON)), "tools")
    return TextContext(TOKENIZER, {"": texts}, texts)


def start_group(size: int = 1, first_trajectory_id: int = 7, **changes: object) -> StartGroup:
    settings: dict[str, object] = {
        **{"group_id": 0, "purpose": "train", "problem": "q:1", "ground_truth": "2", "prompt_ids": PROMPT},
        "sampling": Sampling(),
        "seed": 5,
    }
    return StartGroup(size=size, first_trajectory_id=first_trajectory_id, **{**settings, **changes})  # pyright: ignore[reportArgumentType]


def evaluated(
    label: str, version: int = 0, *, answers: int = 5, failed: int = 0, **changes: object
) -> EvaluationFinished:
    """Build the result of an evaluation in which one answer is correct."""
    totals = TaskCounts(trajectories=answers - failed, trajectories_failed=failed, positives=1, response_tokens=9)
    return EvaluationFinished(label, version, **{"totals": totals, **changes})  # pyright: ignore[reportArgumentType]


def generated(
    trajectory_id: int, turn: int, text: str, finish: str = "stop", version: int = 3, lease: int = 1
) -> TurnGenerated:
    """Build a turn with this text and a final stop token."""
    ids = TOKENIZER.encode(text, trusted=True) + ([END] if finish == "stop" else [])
    return generated_ids(trajectory_id, turn, ids, finish, version, lease)


def generated_ids(
    trajectory_id: int, turn: int, ids: Sequence[int], finish: str, version: int, lease: int
) -> TurnGenerated:
    count = len(ids)
    return TurnGenerated(
        trajectory_id=trajectory_id,
        turn=turn,
        lease=lease,
        token_ids=ids_to_bytes(ids),
        logprobs=b"\x00\x00\x80\xbf" * count,  # float32 -1.0 for each token
        versions=version.to_bytes(4, "little") * count,
        finish=finish,  # pyright: ignore[reportArgumentType]
    )
