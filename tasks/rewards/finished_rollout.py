"""A finished trajectory as reward functions read it: the row, messages and texts."""

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from bus.messages import AnswerSubmitted, bytes_to_ids
from policies.dialogue.chat_format import PREFILL, TURN_END, TextTokenizer

ChatMessage = dict[str, str]

_RESULT_PATTERN = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


class FinishedRollout(NamedTuple):
    row: dict[str, Any]  # of the data file, with `question` and `ground_truth`
    ending: str
    answer: str  # empty without an answer
    messages: list[ChatMessage]  # of the roles "assistant" and "tool"
    response: str  # the decoded response, with the tags of tool calls and results
    response_ids: list[int]


def build_finished_rollout(tokenizer: TextTokenizer, submission: AnswerSubmitted) -> FinishedRollout:
    reward_input = submission.reward_input
    assert reward_input is not None
    token_ids = list(bytes_to_ids(reward_input.token_ids))
    num_prompt = reward_input.prompt_tokens
    response_ids = token_ids[num_prompt:]
    return FinishedRollout(
        row=msgspec.json.decode(reward_input.row),
        ending=reward_input.ending,
        answer=submission.answer if reward_input.ending == "answered" else "",
        messages=list(_iter_messages(tokenizer, response_ids, reward_input.loss_mask[num_prompt:])),
        response=tokenizer.decode(response_ids).removesuffix(TURN_END),
        response_ids=response_ids,
    )


def _iter_messages(tokenizer: TextTokenizer, response_ids: list[int], mask: bytes) -> Iterator[ChatMessage]:
    """Generated tokens are the assistant's; all others belong to tool results."""
    for is_generated, pairs in itertools.groupby(zip(mask, response_ids, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in pairs])
        if is_generated:
            yield {"role": "assistant", "content": PREFILL + text.removesuffix(TURN_END)}
        else:
            for result in _RESULT_PATTERN.findall(text):
                yield {"role": "tool", "content": result}
