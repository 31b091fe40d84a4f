"""A trajectory with the texts and tags of a configuration."""

from collections.abc import Sequence

from asterism.bus import messages as msg
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.dialogue_renderer import ChatMLRenderer
from asterism.policies.rollout.rollout import Rollout
from asterism.tasks.math_python import MATH_PYTHON
from tests.fakes import CALL, TOKENIZER, generated, rules, start_group


class Play:
    """One trajectory with the texts of a configuration."""

    def __init__(self, make_renderer: type[ChatMLRenderer] = ChatMLRenderer, **texts: object) -> None:
        dialogue = DialogueConfig(**texts)  # pyright: ignore
        renderer = make_renderer(TOKENIZER, build_dialogue_format(dialogue, MATH_PYTHON))
        self.rollout = Rollout({"": rules(renderer=renderer)})
        self.rollout.decide(1.0, msg.ExecutorJoined("executor-0", 1))
        self.rollout.decide(2.0, start_group())
        self.turn = 0

    def generate(self, text: str) -> list[object]:
        lease = self.turn + 1
        self.rollout.decide(3.0, msg.LeaseGranted(7, "generator-0", 10_000, lease, 1.0, "room"))
        effects = self.rollout.decide(4.0, generated(7, self.turn, text, lease=lease))
        self.turn += 1
        return [effect.message for effect in effects]


class ClosedFormat(ChatMLRenderer):
    """A chat format that cannot continue after calls."""

    def render_tool_turn(self, record: msg.TokenRecord, results: Sequence[str]) -> list[int] | None:  # pyright: ignore
        return None


def test_a_format_that_cannot_continue_fails_the_trajectory_and_gives_no_reward() -> None:
    play = Play(ClosedFormat)
    play.generate(CALL)
    effects = play.rollout.decide(5.0, msg.CodeFinished(7, 0, msg.CodeOk(msg.Output("1")), 0.1, "executor-0"))
    (failed,) = (effect.message for effect in effects if isinstance(effect.message, msg.TrajectoryFailed))
    assert failed.cause == "renderer: the chat format cannot continue after the turn's calls"


def test_without_tools_a_turn_with_a_call_is_graded_by_its_answer() -> None:
    effects = Play(tools=()).generate(f"{CALL}<answer>\\boxed{{2}}</answer>")
    assert any(isinstance(effect, msg.AnswerSubmitted) and effect.answer == "2" for effect in effects)
    assert not any(isinstance(effect, msg.CodeRequested) for effect in effects)


def test_the_next_turn_starts_with_the_configured_texts() -> None:
    play = Play(prefill="<think>", turn_separator="")
    assert any(isinstance(effect, msg.CodeRequested) for effect in play.generate(CALL))
    play.rollout.decide(5.0, msg.CodeFinished(7, 0, msg.CodeOk(msg.Output("2")), 0.1, "executor-0"))
    text = TOKENIZER.decode(msg.bytes_to_ids(play.rollout.trajectories[7].record.token_ids))
    assert "</tool_call><|im_end|><|im_start|>user\n<tool_response>" in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>")


def test_the_answer_is_the_text_in_the_configured_tags() -> None:
    play = Play(answer_open="[A]", answer_close="[/A]")
    effects = play.generate("[A]\\boxed{1}[/A]<answer>\\boxed{2}</answer>")
    assert any(isinstance(effect, msg.AnswerSubmitted) and effect.answer == "1" for effect in effects)
    trajectory = play.rollout.trajectories[7]
    assert (trajectory.answer_opens, trajectory.answer_closes, trajectory.answer_spans) == (1, 1, 1)
