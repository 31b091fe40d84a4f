"""Renders the turns of a task's dialogues as token ids, and parses the turns of the model."""

from collections.abc import Sequence
from typing import Protocol

from asterism.bus.messages import TokenRecord, bytes_to_ids
from asterism.policies.dialogue.chat_format import (
    DialogueFormat,
    TextTokenizer,
    build_opening_segments,
    build_prompt_segments,
    build_tool_turn_segments,
    build_user_turn_segments,
    encode_segments,
)
from asterism.policies.dialogue.parse_turn import AssistantTurn, parse_assistant_turn


class DialogueRenderer(Protocol):
    """A renderer of growing dialogues: `render_...` return the tokens from the end of the record to the next turn.

    Texts of questions, results and users are untrusted: they never contain special tokens.
    """

    @property
    def dialogue(self) -> DialogueFormat: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end a turn."""
        ...

    def render_prompt(self, question: str) -> list[int]:
        """Render the prompt or, with an opening, only the part before the first observation."""
        ...

    def render_opening(self, observation: str) -> list[int]: ...

    def render_user_turn(self, record: TokenRecord, text: str) -> list[int] | None:
        """Render a turn of the user, or return None if the model's last turn ends within its reasoning."""
        ...

    def render_tool_turn(self, record: TokenRecord, results: Sequence[str]) -> list[int] | None:
        """Render the results of tools, or return None if the format cannot continue."""
        ...

    def parse_turn(self, token_ids: bytes, turn_start: int) -> AssistantTurn:
        """Parse a turn. `token_ids`: int32 [T], up to the turn's last token; `turn_start`: its first position."""
        ...

    def decode_content(self, token_ids: bytes, turn_start: int) -> str:
        """Return the turn's text for a dialogue task."""
        ...

    def decode_response(self, record: TokenRecord) -> str:
        """Return the text of all tokens after the prompt, with special tokens."""
        ...


class ChatMLRenderer:
    """A renderer with the texts of asterism.policies.dialogue.chat_format."""

    def __init__(self, tokenizer: TextTokenizer, dialogue: DialogueFormat) -> None:
        self._tokenizer, self.dialogue = tokenizer, dialogue

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, trusted=True)[0] for text in self.dialogue.stop_tokens)

    def render_prompt(self, question: str) -> list[int]:
        segments = build_prompt_segments(question, self.dialogue)
        return encode_segments(self._tokenizer, segments[:1] if self.dialogue.has_opening else segments)

    def render_opening(self, observation: str) -> list[int]:
        return encode_segments(self._tokenizer, build_opening_segments(observation, self.dialogue))

    def render_user_turn(self, record: TokenRecord, text: str) -> list[int]:
        return encode_segments(self._tokenizer, build_user_turn_segments(text, self.dialogue))

    def render_tool_turn(self, record: TokenRecord, results: Sequence[str]) -> list[int]:
        return encode_segments(self._tokenizer, build_tool_turn_segments(results, self.dialogue))

    def parse_turn(self, token_ids: bytes, turn_start: int) -> AssistantTurn:
        return parse_assistant_turn(self._decode(token_ids, turn_start), self.dialogue)

    def decode_content(self, token_ids: bytes, turn_start: int) -> str:
        text = self._decode(token_ids, turn_start)
        stop = next(filter(text.endswith, self.dialogue.stop_tokens), "")
        return self.dialogue.prefill + text.removesuffix(stop)

    def decode_response(self, record: TokenRecord) -> str:
        return self._decode(record.token_ids, record.prompt_tokens)

    def _decode(self, token_ids: bytes, turn_start: int) -> str:
        return self._tokenizer.decode(bytes_to_ids(token_ids[4 * turn_start :]))
