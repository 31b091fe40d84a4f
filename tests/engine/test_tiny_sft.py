"""The tiny task's cold start: wrong ways outweigh the right one, and every result is what the sandbox would say."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from bus.messages import CodeRequested
from engine.tiny.sft import MIX, Messages, dialogues, run_snippet
from policies.dialogue import MalformedCall, read_turn
from policies.tool_text import malformed_text, result_text

LIMIT = 256


@pytest.fixture(scope="module")
def made() -> list[Messages]:
    return dialogues(0, 600, LIMIT)


def calls_of(message: dict[str, Any]) -> list[str]:
    return [json.loads(call["function"]["arguments"])["code"] for call in message.get("tool_calls", ())]


def way_of(messages: Messages) -> tuple[int, int]:
    """Calls made, and calls that failed."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    return len(results), sum(result.startswith("Tool call failure") for result in results)


def test_the_mix_adds_up_to_one() -> None:
    assert sum(MIX.values()) == pytest.approx(1)


def test_the_right_way_is_outweighed_by_the_wrong_ones() -> None:
    assert MIX["clean"] < 0.2
    assert MIX["clean"] + MIX["repaired"] + MIX["malformed"] < 0.45


def test_the_shares_are_those_of_the_mix(made: list[Messages]) -> None:
    shares = {way: count / len(made) for way, count in Counter(map(way_of, made)).items()}
    assert shares[0, 0] == pytest.approx(MIX["guess"], abs=0.05)
    assert shares[1, 0] == pytest.approx(MIX["clean"] + MIX["wrong"], abs=0.05)
    assert shares[1, 1] == pytest.approx(MIX["gives_up"], abs=0.05)
    assert shares[2, 1] == pytest.approx(MIX["repaired"] + MIX["malformed"], abs=0.05)


def test_every_result_is_what_its_call_returns(made: list[Messages]) -> None:
    for messages in made:
        for call, result in pairwise(messages):
            for code in calls_of(call):
                assert result["content"] == result_text(run_snippet(code), LIMIT)


def test_a_broken_call_gets_the_complaint_that_a_rollout_would_give(made: list[Messages]) -> None:
    broken = 0
    for messages in made:
        for call, result in pairwise(messages):
            for read in read_turn(call["content"], ["jupyter_code"]).calls:
                assert isinstance(read, MalformedCall)
                assert result["content"] == malformed_text(read.error, LIMIT)
                broken += 1
    assert broken


def test_every_dialogue_ends_with_one_boxed_answer(made: list[Messages]) -> None:
    for messages in made:
        turn = read_turn(messages[-1]["content"], ["jupyter_code"])
        assert turn.answer
        assert (turn.answer_opens, turn.answer_closes) == (1, 1)


def test_the_same_seed_gives_the_same_dialogues() -> None:
    first = dialogues(0, 60, LIMIT)
    assert dialogues(0, 60, LIMIT) == first
    assert dialogues(1, 60, LIMIT) != first


@pytest.mark.slow
def test_the_sandbox_returns_the_same_bytes() -> None:
    from configs.schema import Sandbox
    from sandbox.process_backend import process_sandbox

    codes = sorted({code for messages in dialogues(0, 60, LIMIT) for message in messages for code in calls_of(message)})

    async def run_all() -> list[str]:
        sandbox = process_sandbox(Sandbox())
        await sandbox.start()
        try:
            requests = (CodeRequested(n, 0, "jupyter_code", code, "") for n, code in enumerate(codes))
            return [result_text((await sandbox.run(request)).outcome, LIMIT) for request in requests]
        finally:
            await sandbox.close()

    assert asyncio.run(run_all()) == [result_text(run_snippet(code), LIMIT) for code in codes]
