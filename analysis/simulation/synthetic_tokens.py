"""Synthetic dialogues: rules, groups and tokens with the planned lengths, but without text.

All tokens are 0, except the last token of a turn, from which LengthTokenizer derives the turn's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from analysis.simulation.simulated_cache import SimulatedSequence
from analysis.simulation.workload import TrajectoryPlan, Workload
from bus.messages import StartGroup, TurnGenerated
from policies.dialogue.chat_format import format_tool_call
from policies.rollout.trajectory import Rules

CALL_TOKEN, ANSWER_TOKEN = 1, 2

_TURN_TEXTS = {
    CALL_TOKEN: format_tool_call("jupyter_code", {"code": "1"}),
    ANSWER_TOKEN: "<answer>\\boxed{1}</answer>",
}
_ZEROS = bytes(4 * 65_536)


class LengthTokenizer:
    """Implements policies.dialogue.chat_format.TextTokenizer.

    The text of a tool's result is its number of tokens, header included.
    """

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        return [] if trusted else [0] * int(text.rsplit("\n", 1)[-1])

    def decode(self, token_ids: Sequence[int]) -> str:
        return _TURN_TEXTS[token_ids[-1]]


def build_generated_turn(sequence: SimulatedSequence, *, stops: bool, last: bool) -> TurnGenerated:
    """`last`: this is the trajectory's last turn, which submits the answer."""
    tokens = sequence.tokens - sequence.request_tokens
    return TurnGenerated(
        trajectory_id=sequence.trajectory_id,
        turn=sequence.turn,
        lease=sequence.lease,
        token_ids=_ZEROS[: 4 * tokens - 4] + (ANSWER_TOKEN if last else CALL_TOKEN).to_bytes(4, "little"),
        logprobs=b"",  # unused here; a step's would take a gigabyte
        versions=b"",
        finish="stop" if stops else "length",
    )


def build_dialogue_rules(workload: Workload) -> Rules:
    return Rules(
        tools=("jupyter_code",),
        response_tokens=workload.response_tokens,
        max_turns=workload.max_turns,
        max_calls_per_turn=1,
        result_characters=64,
        top_p=1.0,
        top_k=0,
        stop_token_ids=(0,),
    )


def build_groups(workload: Workload) -> list[StartGroup]:
    return [_build_group(list(plans)) for _, plans in groupby(workload.plans, key=lambda plan: plan.group_id)]


def _build_group(plans: Sequence[TrajectoryPlan]) -> StartGroup:
    return StartGroup(
        group_id=plans[0].group_id,
        purpose="train",
        problem="",
        ground_truth="",
        prompt_ids=bytes(4 * plans[0].prompt_tokens),
        size=len(plans),
        first_trajectory_id=plans[0].trajectory_id,
        temperature=1.0,
        seed=0,
    )
