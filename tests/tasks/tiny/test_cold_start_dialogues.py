"""The cold start of the tiny task has the configured behaviors, and its results equal the results of the sandbox."""

import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import asdict

from asterism.policies.dialogue.parse_turn import MalformedCall, parse_assistant_turn
from asterism.policies.dialogue.tool_results import format_malformed_call, format_result
from asterism.tasks.tiny.cold_start_dialogues import FORMAT, BehaviorShares, Messages, generate_dialogues, run_snippet
from asterism.tasks.tiny.derivations import write_derivation
from asterism.tasks.tiny.questions import generate_questions
from tests.sandbox.conftest import open_sandbox

LIMIT = 256


@pytest.fixture(scope="module")
def dialogues() -> list[Messages]:
    return generate_dialogues(0, 600, LIMIT)


def list_codes(message: dict[str, Any]) -> list[str]:
    return [json.loads(call["function"]["arguments"])["code"] for call in message.get("tool_calls", ())]


def count_calls(messages: Messages) -> tuple[int, int]:
    """Return the number of calls and the number of failed calls in a dialogue."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    return len(results), sum(result.startswith("Tool call failure") for result in results)


def test_generated_dialogues_have_the_configured_shares(dialogues: list[Messages]) -> None:
    counted = {counts: number / len(dialogues) for counts, number in Counter(map(count_calls, dialogues)).items()}
    shares = BehaviorShares()
    assert counted[0, 0] == pytest.approx(shares.guess, abs=0.05)
    assert counted[1, 0] == pytest.approx(shares.clean + shares.wrong, abs=0.05)
    assert counted[1, 1] == pytest.approx(shares.gives_up, abs=0.05)
    assert counted[2, 1] == pytest.approx(shares.repaired + shares.malformed, abs=0.05)


def test_dialogues_have_only_behaviors_with_a_positive_share() -> None:
    none = dict.fromkeys(asdict(BehaviorShares()), 0.0)
    mixture = BehaviorShares(**none | {"reasoned": 3, "unrepaired": 1})
    counted = Counter(map(count_calls, generate_dialogues(0, 200, LIMIT, mixture)))
    assert set(counted) == {(0, 0), (1, 1)}
    assert counted[0, 0] / 200 == pytest.approx(0.75, abs=0.1)
    with pytest.raises(ValueError, match="at least one share must be above 0"):
        BehaviorShares(**none)


def test_every_step_of_a_derivation_is_right_and_the_last_step_is_the_answer() -> None:
    questions = generate_questions(0, 300, held_out=False)
    steps = 0
    for question in questions:
        text = write_derivation(question)
        assert re.findall(r"\d+", text)[-1] == str(question.answer)
        for left, right in re.findall(r"([\d+*/-]+|\d+ mod \d+)=(\d+)\.", text):
            assert eval(left.replace(" mod ", "%")) == int(right), text
            steps += 1
    assert steps > len(questions)


def test_every_result_equals_the_output_of_its_call(dialogues: list[Messages]) -> None:
    for messages in dialogues:
        for call, result in pairwise(messages):
            for code in list_codes(call):
                assert result["content"] == format_result(run_snippet(code), LIMIT)


def test_a_malformed_call_has_the_error_message_of_a_rollout(dialogues: list[Messages]) -> None:
    broken = 0
    for messages in dialogues:
        for call, result in pairwise(messages):
            for read in parse_assistant_turn(call["content"], FORMAT).calls:
                assert isinstance(read, MalformedCall)
                assert result["content"] == format_malformed_call(read, LIMIT)
                broken += 1
    assert broken


def test_every_dialogue_ends_with_one_boxed_answer(dialogues: list[Messages]) -> None:
    for messages in dialogues:
        turn = parse_assistant_turn(messages[-1]["content"], FORMAT)
        assert turn.answer
        assert (turn.answer_opens, turn.answer_closes, turn.answer_spans) == (1, 1, 1)


@pytest.mark.slow
@pytest.mark.real_clock
async def test_the_sandbox_returns_the_same_bytes() -> None:
    codes = sorted(
        {code for messages in generate_dialogues(0, 60, LIMIT) for message in messages for code in list_codes(message)}
    )
    async with open_sandbox("process") as client:
        results = [format_result((await client.cell(code, n)).outcome, LIMIT) for n, code in enumerate(codes)]
    assert results == [format_result(run_snippet(code), LIMIT) for code in codes]
