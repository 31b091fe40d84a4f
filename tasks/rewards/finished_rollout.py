"""The input of reward functions: a finished trajectory as row, messages and texts."""

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from asterism.bus.messages import AnswerSubmitted, bytes_to_ids
from asterism.policies.dialogue.chat_format import TextTokenizer

ChatMessage = dict[str, str]

_RESULT_PATTERN = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


class FinishedRollout(NamedTuple):
    row: dict[str, Any]  # row of the data file, with `question` and `ground_truth`
    ending: str
    messages: list[ChatMessage]  # messages of the roles "assistant" and "tool"
    response: str  # the decoded response, with the tags of tool calls and results
    response_ids: list[int]


class RolloutReader:
    """Decodes the tokens of trajectories with the configured texts of dialogues."""

    def __init__(self, tokenizer: TextTokenizer, prefill: str, stop_tokens: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._prefill = prefill
        self._stop_tokens = stop_tokens

    def read(self, submission: AnswerSubmitted) -> FinishedRollout:
        """Decode a submission, which must have a reward input."""
        reward_input = submission.reward_input
        assert reward_input is not None
        num_prompt = reward_input.prompt_tokens
        response_ids = list(bytes_to_ids(reward_input.token_ids))[num_prompt:]
        return FinishedRollout(
            row=msgspec.json.decode(reward_input.row),
            ending=reward_input.ending,
            messages=list(self._iter_messages(response_ids, reward_input.loss_mask[num_prompt:])),
            response=self._decode_turn(response_ids),
            response_ids=response_ids,
        )

    def _iter_messages(self, response_ids: list[int], mask: bytes) -> Iterator[ChatMessage]:
        """Decode generated tokens as messages of the assistant, and all other tokens as tool results."""
        for is_generated, pairs in itertools.groupby(zip(mask, response_ids, strict=True), key=lambda pair: pair[0]):
            token_ids = [token for _, token in pairs]
            if is_generated:
                yield {"role": "assistant", "content": self._prefill + self._decode_turn(token_ids)}
            else:
                for result in _RESULT_PATTERN.findall(self._tokenizer.decode(token_ids)):
                    yield {"role": "tool", "content": result}

    def _decode_turn(self, token_ids: list[int]) -> str:
        """Decode a turn without its stop token."""
        text = self._tokenizer.decode(token_ids)
        return text.removesuffix(next(filter(text.endswith, self._stop_tokens), ""))
