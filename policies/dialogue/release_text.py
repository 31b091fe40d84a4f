"""Reads a whole response as rStar2-Agent's public release does: the counts for its penalties, and the answer.

The text starts after the first prompt: it lacks the header of the first assistant turn, and contains every later
header, tool result and end of a turn. Tags count at any place: in the reasoning, in tool output, in earlier turns.
Matching is case-sensitive, and a block extends from an opening tag to the next closing one, across turns. The word
"error" counts in any case, also in blocks that the model wrote itself. The answer is the last box of the text, at any
place. docs/release.md compares the results with those of the release.

    6*7.</reason><tool_call>{...}</tool_call><|im_end|>    the first turn: no header, not counted
    <|im_start|>user
    <tool_response>ValueError ...</tool_response><|im_end|>    a result with the word
    <|im_start|>assistant
    <reason>So.</reason><answer>\\boxed{42}</answer><|im_end|>    one turn, one answer
"""

from asterism.bus.messages import ReleaseCounts
from asterism.policies.dialogue.boxed_answers import extract_last_boxed
from asterism.policies.dialogue.call_blocks import find_blocks
from asterism.policies.dialogue.chat_format import TURN_END, TURN_START, DialogueFormat

_ASSISTANT = f"{TURN_START}assistant"
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>", "</tool_response>"
_WORD = "error"


def count_release_marks(text: str, dialogue: DialogueFormat) -> ReleaseCounts:
    """Count the marks. `text`: all tokens after the prompt, with special tokens."""
    results = find_blocks(text, _RESULT_OPEN, _RESULT_CLOSE)
    return ReleaseCounts(
        tool_responses=len(results),
        responses_with_error=sum(_WORD in result.lower() for result in results),
        answer_opens=text.count(dialogue.answer_open),
        answer_closes=text.count(dialogue.answer_close),
        answer_spans=len(find_blocks(text, dialogue.answer_open, dialogue.answer_close)),
        turns=len(find_blocks(text, _ASSISTANT, TURN_END)),
    )


def find_response_answer(text: str, dialogue: DialogueFormat) -> str | None:
    """Return the last box; without a box, the last answer block if the task has unboxed answers."""
    boxed = extract_last_boxed(text)
    if boxed is not None or dialogue.has_boxed_answer:
        return boxed
    blocks = find_blocks(text, dialogue.answer_open, dialogue.answer_close)
    return blocks[-1].strip() if blocks else None
