"""OpenEnvDialogue with a scripted server: requests, texts, rewards and kinds of failures."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asterism.tasks.bridges.openenv_dialogue import OpenEnvDialogue
from asterism.tasks.contract import Fault, Opening, Reply
from tests.tasks.bridges.openenv_stub import OpenEnvStub, fail, observe

pytestmark = pytest.mark.real_clock
TURN = {"role": "assistant", "content": "a move"}
START = observe({"text": "start", "board": [1, 2], "metadata": {"secret": 1}})


@pytest.fixture(autouse=True)
def no_checked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the checked servers, because a server of an earlier test can have had the same port."""
    monkeypatch.setattr("asterism.tasks.bridges.openenv_session._checked", set())


@asynccontextmanager
async def opened(stub: OpenEnvStub, **parameters: Any) -> AsyncGenerator[OpenEnvDialogue]:
    """Open a dialogue with the stub; the caller calls `init`."""
    async with stub.serving() as url:
        dialogue = OpenEnvDialogue(url, **parameters)
        try:
            yield dialogue
        finally:
            await dialogue.close()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "`url` must start with http"),
        ({"url": "http://host", "time_limit_s": 0.0}, "`time_limit_s` must be positive"),
        ({"url": "http://host", "observation_fields": []}, "`observation_fields` is empty"),
    ],
)
def test_unsuitable_parameters_are_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenEnvDialogue(**parameters)


async def test_init_resets_with_the_seed_of_the_row_and_steps_send_the_action_field() -> None:
    stub = OpenEnvStub(START, observe({"text": "next"}))
    async with opened(stub, reset={"level": 2, "seed": 1}, observation_fields=["text"]) as dialogue:
        assert await dialogue.init({"question": "?", "seed": 7}) == Opening(messages="start")
        assert await dialogue.step(TURN) == Reply(messages="next")
    assert stub.requests == [
        {"type": "reset", "data": {"level": 2, "seed": 7}},
        {"type": "step", "data": {"message": "a move"}},
        {"type": "close"},
    ]


@pytest.mark.parametrize("row", [{}, {"seed": None}])
async def test_a_row_without_a_seed_resets_only_with_the_parameters(row: dict[str, Any]) -> None:
    stub = OpenEnvStub(START)
    async with opened(stub, reset={"seed": 1}) as dialogue:
        await dialogue.init(row)
    assert stub.requests[0]["data"] == {"seed": 1}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (None, '{"text": "start", "board": [1, 2]}'),
        (["text"], "start"),
        (["board"], "[1, 2]"),
        (["board", "text"], "board: [1, 2]\ntext: start"),
    ],
)
async def test_the_observation_is_text_of_the_named_fields(fields: list[str] | None, text: str) -> None:
    async with opened(OpenEnvStub(START), observation_fields=fields) as dialogue:
        assert (await dialogue.init({})).messages == text


@pytest.mark.parametrize(
    ("reward", "rewards"), [(None, {}), (0, {"environment": 0.0}), (True, {"environment": 1.0}), (-0.5, None)]
)
async def test_a_step_returns_the_servers_reward_and_done(reward: Any, rewards: Any) -> None:
    stub = OpenEnvStub(START, observe({"text": "end"}, reward, done=True))
    async with opened(stub, observation_fields=["text"]) as dialogue:
        await dialogue.init({})
        expected = {"environment": reward} if rewards is None else rewards
        assert await dialogue.step(TURN) == Reply(messages="end", done=True, rewards=expected)


async def test_errors_that_an_action_can_cause_are_texts_for_the_model() -> None:
    refused = fail("VALIDATION_ERROR", "Invalid message", errors=[{"msg": "too long", "loc": ["message"]}])
    stub = OpenEnvStub(START, fail("EXECUTION_ERROR", "illegal move"), refused, observe({"text": "next"}))
    async with opened(stub, observation_fields=["text"]) as dialogue:
        await dialogue.init({})
        metrics = {"environment_errors": 1.0}
        assert await dialogue.step(TURN) == Reply(messages="Error: illegal move", metrics=metrics)
        assert await dialogue.step(TURN) == Reply(messages="Error: Invalid message; too long", metrics=metrics)
        assert (await dialogue.step(TURN)).messages == "next"


@pytest.mark.parametrize(
    ("stub", "parameters", "texts"),
    [
        (
            OpenEnvStub(greeting=fail("CAPACITY_REACHED", "full", active_sessions=4, max_sessions=4)),
            {},
            ["allows 4 sessions, and all are in use", "max_concurrent_envs"],
        ),
        (OpenEnvStub(fail("EXECUTION_ERROR", "no such level")), {}, ["reset failed: no such level"]),
        (OpenEnvStub(observe({"text": ""}, done=True)), {}, ["done after reset"]),
        (OpenEnvStub(START), {"observation_fields": ["txt"]}, ["has no txt; it has text, board"]),
        (OpenEnvStub(START), {"action_field": "text"}, ["has no field text; it has message"]),
    ],
    ids=["no free session", "error of reset", "done after reset", "missing observation field", "missing action field"],
)
async def test_a_fault_of_init_names_its_cause(stub: OpenEnvStub, parameters: dict[str, Any], texts: list[str]) -> None:
    async with opened(stub, **parameters) as dialogue:
        with pytest.raises(Fault) as raised:
            await dialogue.init({})
    assert [text for text in texts if text not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        *(
            ([fail(code, "why")], f"step failed: {code}: why")
            for code in ("SESSION_ERROR", "FACTORY_ERROR", "INVALID_JSON", "UNKNOWN_TYPE", "A_NEW_CODE")
        ),
        *(
            ([frame], "sent a malformed frame")
            for frame in ("", "nonsense", "[]", '{"type": "state", "data": {}}', observe(3), observe({}, float("nan")))  # pyright: ignore
        ),
        ([b"\0"], "closed the connection (binary"),
        ([], "closed the connection (close"),
        ([None], "no answer within 0.1 s"),
    ],
)
async def test_a_fault_of_a_step_names_its_cause(frames: list[str | bytes | None], text: str) -> None:
    async with opened(OpenEnvStub(START, *frames), time_limit_s=0.1 if None in frames else 20.0) as dialogue:
        await dialogue.init({})
        with pytest.raises(Fault) as raised:
            await dialogue.step(TURN)
    assert text in str(raised.value)


async def test_a_session_is_unusable_after_a_cancelled_step() -> None:
    """On a usable session, the next step would receive the answer to the cancelled step."""
    async with opened(OpenEnvStub(START, None, observe({"text": "next"}))) as dialogue:
        await dialogue.init({})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(dialogue.step(TURN), 0.05)
        with pytest.raises(Fault, match="no usable session"):
            await dialogue.step(TURN)


async def test_a_second_init_after_a_failed_init_opens_another_session() -> None:
    stub = OpenEnvStub(fail("FACTORY_ERROR", "busy"))
    async with opened(stub) as dialogue:
        for _ in range(2):
            with pytest.raises(Fault, match="FACTORY_ERROR"):
                await dialogue.init({})
        assert stub.num_open == 1


@pytest.mark.parametrize("schema", [None, {}, {"action": {"properties": {"a": {}}, "additionalProperties": True}}])
async def test_a_server_without_a_closed_schema_accepts_any_action_field(schema: Any) -> None:
    async with opened(OpenEnvStub(START, schema=schema), action_field="text") as dialogue:
        await dialogue.init({})


async def test_the_schema_is_read_once_per_process() -> None:
    stub = OpenEnvStub(START)
    async with stub.serving() as url:
        for _ in range(3):
            dialogue = OpenEnvDialogue(url)
            await dialogue.init({})
            await dialogue.close()
    assert stub.num_schemas == 1


async def test_an_unreachable_server_is_a_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    dialogue = OpenEnvDialogue(f"ws://127.0.0.1:{port}/ws/")
    with pytest.raises(Fault, match=f"http://127.0.0.1:{port}: cannot connect"):
        await dialogue.init({})
    await dialogue.close()


async def test_a_step_before_init_is_a_fault_and_close_needs_no_session() -> None:
    dialogue = OpenEnvDialogue("http://127.0.0.1:9")
    with pytest.raises(Fault, match="no usable session"):
        await dialogue.step(TURN)
    await dialogue.close()
