"""Builds synthetic dialogues: rules, groups and tokens with the planned lengths, but without text.

Prompt ids derive from the group and generated ids from the trajectory, so that engines share the
prompts of a group and nothing else. LengthTokenizer derives a turn's text from the turn's last token. The results of
tools are zeros.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from asterism.analysis.simulation.workload import TrajectoryPlan, Workload
from asterism.bus.messages import StartGroup, TurnGenerated, TurnRequested
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.dialogue_renderer import ChatMLRenderer
from asterism.policies.dialogue.json_calls import format_tool_call
from asterism.policies.rollout.trajectory import Rules
from asterism.policies.tools.task_description import TaskDescription

CALL_TOKEN, ANSWER_TOKEN = 1, 2
_NUM_SPECIAL, _NUM_IDS = 3, 250  # small ids: CPython caches these int objects

_TURN_TEXTS = {
    CALL_TOKEN: format_tool_call("jupyter_code", {"code": "1"}),
    ANSWER_TOKEN: "<answer>\\boxed{1}</answer>",
}


class LengthTokenizer:
    """Implements asterism.policies.dialogue.chat_format.TextTokenizer.

    The text of a tool's result is its number of tokens, header included.
    """

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        return [] if trusted else [0] * int(text.rsplit("\n", 1)[-1])

    def decode(self, token_ids: Sequence[int]) -> str:
        return _TURN_TEXTS[token_ids[-1]]


def build_trajectory_ids(number: int, count: int) -> NDArray[np.int32]:
    """Build `count` tokens that differ from the tokens of the next trajectories."""
    return np.full(count, _NUM_SPECIAL + number % _NUM_IDS, np.int32)


def build_generated_turn(request: TurnRequested, plan: TrajectoryPlan) -> TurnGenerated:
    """Build the planned tokens of a turn, or as many of them as the request allows."""
    planned_tokens = plan.ends[request.turn] - len(request.token_ids) // 4
    ids = build_trajectory_ids(plan.trajectory_id, min(planned_tokens, request.max_new_tokens))
    ids[-1] = ANSWER_TOKEN if request.turn + 1 == len(plan.turns) else CALL_TOKEN
    return TurnGenerated(
        trajectory_id=request.trajectory_id,
        turn=request.turn,
        lease=request.lease,
        token_ids=ids.tobytes(),
        logprobs=b"",  # unused here; the logprobs of a step would take a gigabyte
        versions=b"",
        finish="stop" if planned_tokens <= request.max_new_tokens else "length",
    )


def build_dialogue_rules(workload: Workload) -> Rules:
    return Rules(
        renderer=ChatMLRenderer(
            LengthTokenizer(), build_dialogue_format(DialogueConfig(tools=("jupyter_code",)), TaskDescription("tools"))
        ),
        response_tokens=workload.response_tokens,
        max_turns=workload.max_turns,
        max_calls_per_turn=1,
        result_characters=64,
        stop_token_ids=(0,),
    )


def build_groups(workload: Workload) -> list[StartGroup]:
    return [_build_group(list(plans)) for _, plans in groupby(workload.plans, key=lambda plan: plan.group_id)]


def _build_group(plans: Sequence[TrajectoryPlan]) -> StartGroup:
    prompt_ids = build_trajectory_ids(plans[0].group_id, plans[0].prompt_tokens)
    prompt_ids[0] += plans[0].group_id // _NUM_IDS  # no other group has this prompt
    return StartGroup(
        group_id=plans[0].group_id,
        purpose="train",
        problem="",
        ground_truth="",
        prompt_ids=prompt_ids.tobytes(),
        size=len(plans),
        first_trajectory_id=plans[0].trajectory_id,
        sampling=Sampling(),
        seed=0,
    )
