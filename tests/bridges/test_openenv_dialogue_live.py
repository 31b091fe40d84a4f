"""OpenEnvDialogue with a server of the package openenv."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from asterism.tasks.bridges.openenv_dialogue import OpenEnvDialogue
from asterism.tasks.contract import Fault, Reply
from tests.bridges.bridge_servers import OPENENV_SERVER, BridgeServer, serving

pytestmark = [pytest.mark.bridges, pytest.mark.real_clock]


@pytest.fixture(scope="module")
def shared() -> Iterator[BridgeServer]:
    """Yield a server with room for two sessions."""
    with serving(*OPENENV_SERVER, "2") as each:
        yield each


@pytest.fixture
def single() -> Iterator[BridgeServer]:
    """Yield a server with room for one session, which is the default."""
    with serving(*OPENENV_SERVER, "1") as each:
        yield each


def make_dialogue(server: BridgeServer, **parameters: Any) -> OpenEnvDialogue:
    shown: dict[str, Any] = {"observation_fields": ["text"], **parameters}
    return OpenEnvDialogue(server.url, **shown)


async def say(dialogue: OpenEnvDialogue, text: str) -> Reply:
    return await asyncio.create_task(dialogue.step({"role": "assistant", "content": text}))


async def test_an_episode_runs_from_reset_to_done_with_the_reward_of_each_step(shared: BridgeServer) -> None:
    dialogue = make_dialogue(shared, reset={"name": "Ada"})
    opening = await asyncio.create_task(dialogue.init({"question": "", "seed": 7}))
    assert opening.messages == "Guess, Ada!"
    assert await say(dialogue, "3") == Reply(messages="higher", rewards={"environment": -0.25})
    assert await say(dialogue, "9") == Reply(messages="lower", rewards={"environment": -0.25})
    assert await say(dialogue, "7") == Reply(messages="right", done=True, rewards={"environment": 1.0})
    await asyncio.create_task(dialogue.close())


async def test_the_whole_observation_is_json_without_done_reward_and_metadata(shared: BridgeServer) -> None:
    dialogue = make_dialogue(shared, observation_fields=None)
    opening = await dialogue.init({"seed": 7})
    assert json.loads(str(opening.messages)) == {"text": "Guess!", "tries": 0}
    await dialogue.close()


async def test_two_sessions_have_separate_environments(shared: BridgeServer) -> None:
    first, second = make_dialogue(shared), make_dialogue(shared)
    await asyncio.gather(first.init({"seed": 1}), second.init({"seed": 2}))
    assert [(await say(each, "2")).messages for each in (first, second)] == ["lower", "right"]
    assert (await say(first, "1")).done
    await asyncio.gather(first.close(), second.close())


async def test_an_error_of_an_action_is_a_text_for_the_model_and_the_episode_continues(shared: BridgeServer) -> None:
    dialogue = make_dialogue(shared)
    await dialogue.init({"seed": 3})
    not_a_number = await say(dialogue, "three")
    too_long = await say(dialogue, "3" * 21)
    assert "Error: invalid literal for int()" in str(not_a_number.messages)
    assert "at most 20 characters" in str(too_long.messages)
    assert not_a_number.metrics == too_long.metrics == {"environment_errors": 1.0}
    assert (await say(dialogue, "3")).done
    await dialogue.close()


async def test_a_full_server_is_a_fault_until_close_frees_a_place(single: BridgeServer) -> None:
    first, second = make_dialogue(single), make_dialogue(single)
    await first.init({"seed": 1})
    with pytest.raises(Fault, match=r"allows 1 sessions, and all are in use; .* max_concurrent_envs"):
        await second.init({"seed": 1})
    await second.close()
    for _ in range(5):  # each session needs the place that the previous session has left
        await first.close()
        await first.init({"seed": 1})
    await first.close()


async def test_an_unknown_action_field_is_a_fault_that_lists_the_known_fields(shared: BridgeServer) -> None:
    dialogue = make_dialogue(shared, action_field="text")
    with pytest.raises(Fault, match="has no field text; it has message"):
        await dialogue.init({})
    await dialogue.close()


async def test_an_unknown_observation_field_is_a_fault_that_lists_the_known_fields(shared: BridgeServer) -> None:
    dialogue = make_dialogue(shared, observation_fields=["board"])
    with pytest.raises(Fault, match=r"has no board; it has .*text, tries"):
        await dialogue.init({"seed": 1})
    await dialogue.close()


async def test_a_server_that_is_killed_between_steps_is_a_fault(single: BridgeServer) -> None:
    dialogue = make_dialogue(single)
    await dialogue.init({"seed": 1})
    single.kill()
    for _ in range(2):
        with pytest.raises(Fault, match=single.url):
            await say(dialogue, "1")
    await dialogue.close()
    with pytest.raises(Fault, match="cannot connect"):
        await dialogue.init({"seed": 1})
    await dialogue.close()


async def test_a_server_that_is_killed_during_a_step_is_a_fault(single: BridgeServer) -> None:
    dialogue = make_dialogue(single)
    await dialogue.init({"seed": 1})
    waiting = asyncio.create_task(say(dialogue, "wait"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    single.kill()
    with pytest.raises(Fault, match="closed the connection"):
        await waiting
    await dialogue.close()


async def test_an_unanswered_step_is_a_fault_that_ends_its_session(single: BridgeServer) -> None:
    dialogue = make_dialogue(single, time_limit_s=1.0)
    await dialogue.init({"seed": 1})
    with pytest.raises(Fault, match="no answer within 1 s"):
        await say(dialogue, "wait")
    with pytest.raises(Fault, match="no usable session"):
        await say(dialogue, "1")
    await dialogue.close()
