"""A trajectory with the texts and tags of a configuration."""

from collections.abc import Sequence

from asterism.bus import messages as msg
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.dialogue_renderer import ChatMLRenderer
from asterism.tasks.math_python import MATH_PYTHON
from tests.fakes import CALL, TOKENIZER
from tests.policies.rollout.conversations import Conversation, find


def play(make_renderer: type[ChatMLRenderer] = ChatMLRenderer, **texts: object) -> Conversation:
    """Return a conversation with the texts of a configuration."""
    dialogue = build_dialogue_format(DialogueConfig(**texts), MATH_PYTHON)  # pyright: ignore
    return Conversation("tools", renderer=make_renderer(TOKENIZER, dialogue))


class ClosedFormat(ChatMLRenderer):
    """A chat format that cannot continue after calls."""

    def render_tool_turn(self, record: msg.TokenRecord, results: Sequence[str]) -> list[int] | None:  # pyright: ignore
        return None


def test_a_format_that_cannot_continue_fails_the_trajectory_and_gives_no_reward() -> None:
    made = play(ClosedFormat)
    made.say(CALL)
    assert (
        find(made.finish_code(0, "1"), msg.TrajectoryFailed).cause
        == "renderer: the chat format cannot continue after the turn's calls"
    )


def test_without_tools_a_turn_with_a_call_is_graded_by_its_answer() -> None:
    sends = play(tools=()).say(f"{CALL}<answer>\\boxed{{2}}</answer>")
    assert find(sends, msg.AnswerSubmitted).answer == "2"
    assert not any(isinstance(send.message, msg.CodeRequested) for send in sends)


def test_the_next_turn_starts_with_the_configured_texts() -> None:
    made = play(prefill="<think>", turn_separator="")
    find(made.say(CALL), msg.CodeRequested)
    made.finish_code(0, "2")
    assert "</tool_call><|im_end|><|im_start|>user\n<tool_response>" in made.text
    assert made.text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>")


def test_the_answer_is_the_text_in_the_configured_tags() -> None:
    made = play(answer_open="[A]", answer_close="[/A]")
    assert find(made.say("[A]\\boxed{1}[/A]<answer>\\boxed{2}</answer>"), msg.AnswerSubmitted).answer == "1"
    trajectory = made.rollout.trajectories[0]
    assert (trajectory.answer_opens, trajectory.answer_closes, trajectory.answer_spans) == (1, 1, 1)
