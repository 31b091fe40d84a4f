"""A chat session has history, calls, interrupts, limits, failures and user-defined tasks."""

import asyncio
import json
from pathlib import Path

import pytest

from asterism.actors.cli.chat.chat_session import ChatRefused
from asterism.actors.cli.chat.chat_transcript import build_row
from asterism.bus.messages import EnvironmentRaised, Observation
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.data.datasets import DatasetProblem
from asterism.engine.data.sft_dialogues import iter_sft_dialogues
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.tools.task_description import TaskDescription
from asterism.policies.tools.tool_schema import ToolSchema
from tests.actors.cli.chat.scripted_chats import BROKEN, ENDLESS, SAMPLING, ScriptedChat
from tests.fakes import END, TOKENIZER

THOUGHT = "Hm.</reason>\n"
ANSWER = THOUGHT + "<answer>\\boxed{2}</answer>"


def call(code: str, tool: str = "jupyter_code") -> str:
    return f"{THOUGHT}<tool_call>\n{json.dumps({'name': tool, 'arguments': {'code': code}})}\n</tool_call>"


async def test_a_cold_start_on_the_transcript_has_the_same_token_ids(tmp_path: Path) -> None:
    chat = ScriptedChat(call("1"), ANSWER, call("2"), call("3"), ANSWER)
    assert (await chat.session.answer("one"))[:2] == ("answered", 2)
    assert (await chat.session.answer("two")).turns == 3
    row = build_row(chat.session.messages, chat.rules.dialogue.system, "")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (learned,) = iter_sft_dialogues(path, TOKENIZER, {"": chat.rules.dialogue})
    last = chat.engine.requests[-1].token_ids.tolist()
    assert learned.token_ids == [*last, *TOKENIZER.encode(ANSWER, trusted=True), END]
    assert [request.seed for request in chat.engine.requests] == [chat.engine.requests[0].seed] * 5
    assert {each.sampling for each in chat.engine.requests} == {SAMPLING}


async def test_calls_and_results_are_shown_as_the_model_reads_them() -> None:
    chat = ScriptedChat(call("1") + call("2") + "<tool_call>{</tool_call>", ANSWER, max_calls_per_turn=2)
    await chat.session.answer("one")
    assert (
        "[jupyter_code] Tool call success\nstdout:\n1\n[jupyter_code] Tool call success\nstdout:\n2\n" in chat.view.text
    )
    assert "[not run] Tool call failure\nJSONDecodeError: " in chat.view.text
    read = [message["content"] for message in chat.session.messages if message["role"] == "tool"]
    assert len(read) == 3
    assert all(f"<tool_response>\n{text}\n</tool_response>" in chat.read_prompt(1) for text in read)
    assert all(text in chat.view.text for text in read)


@pytest.mark.parametrize("others", [(), tuple(TOKENIZER.encode("Z", trusted=True))], ids=["", "another-stop-token"])
async def test_an_interrupted_answer_keeps_its_tokens_and_gets_an_end_token(others: tuple[int, ...]) -> None:
    chat = ScriptedChat("I count: 1 2 3...", ANSWER, stop_token_ids=(*others, END))
    answering = asyncio.ensure_future(chat.session.answer("count"))
    await chat.engine.endless_turn_began.wait()
    chat.session.interrupt()
    assert (await answering).ending == "interrupted"
    assert chat.session.messages[-1] == {"role": "assistant", "content": "<reason>I count: 1 2 3..."}
    assert (await chat.session.answer("more")).ending == "answered"
    prompt = chat.read_prompt(1)
    assert "<reason>I count: 1 2 3...<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n" in prompt


async def test_an_interrupt_stops_a_call_and_the_model_reads_an_error() -> None:
    chat = ScriptedChat(call(ENDLESS), ANSWER)
    answering = asyncio.ensure_future(chat.session.answer("wait"))
    await chat.sandbox.endless_call_began.wait()
    chat.session.interrupt()
    assert (await answering).ending == "answered"
    assert chat.sandbox.num_cancelled == 1
    result = "Tool call failure\nKeyboardInterrupt: interrupted by the user"
    assert f"[jupyter_code] {result}\n" in chat.view.text
    assert f"<tool_response>\n{result}\n</tool_response>" in chat.read_prompt(1)


async def test_an_interrupt_between_a_turn_and_its_call_stops_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ScriptedChat(call(ENDLESS), ANSWER)
    ends = iter((chat.session.interrupt, lambda: None))
    monkeypatch.setattr(chat.view, "end_turn", lambda: next(ends)())
    assert (await chat.session.answer("wait")).ending == "answered"
    assert chat.sandbox.calls == []
    assert "KeyboardInterrupt: interrupted by the user" in chat.read_prompt(1)


async def test_each_message_resets_the_limits() -> None:
    chat = ScriptedChat(call("1"), call("2"), call("3"), call("4"), "1" * 5000, ANSWER, max_turns=2)
    assert [(await chat.session.answer(text)).ending for text in ("a", "b", "c", "d")] == [
        *("turns", "turns", "length", "answered")
    ]
    assert [each.code for each in chat.sandbox.calls] == ["1", "3"]
    roles = [message["role"] for message in chat.session.messages]
    turn_limit = ["user", "assistant", "tool", "assistant"]
    assert roles == [*turn_limit, *turn_limit, "user", "assistant", "user", "assistant"]


async def test_a_full_context_ends_an_answer_and_refuses_the_next_message() -> None:
    chat = ScriptedChat("1" * 5000, context_tokens=2000)
    assert (await chat.session.answer("a")).ending == "context"
    with pytest.raises(ChatRefused, match=r"the conversation would have \d+ of 2000 tokens"):
        await chat.session.answer("b")
    assert [message["role"] for message in chat.session.messages] == ["user", "assistant"]


async def test_a_failure_is_retried_once_and_does_not_change_the_conversation() -> None:
    chat = ScriptedChat(ANSWER, BROKEN, ANSWER, call(BROKEN), ANSWER, BROKEN, BROKEN, ANSWER)
    assert (await chat.session.answer("a")).ending == "answered"
    assert (await chat.session.answer("b")).ending == "answered"
    before = list(chat.session.messages)
    end = await chat.session.answer("c")
    assert (end.ending, end.turns, end.cause) == ("failed", 1, "sandbox: the server [died]")
    assert chat.session.messages == before
    chat.engine._texts.pop(0)
    end = await chat.session.answer("d")
    assert (end.ending, end.cause) == ("failed", "engine: out of memory")
    assert (await chat.session.answer("e")).ending == "answered"
    assert "c<|im_end|>" not in chat.read_prompt(-1)
    assert "user\ne<|im_end|>" in chat.read_prompt(-1)


async def test_a_failed_answer_does_not_change_the_notebook() -> None:
    chat = ScriptedChat(call("1"), BROKEN, BROKEN, call("2"), ANSWER, call("3"), BROKEN, BROKEN)
    await chat.session.answer("a")
    assert (chat.sandbox.ended, chat.sandbox.restored) == ([0], [])
    await chat.session.answer("b")
    await chat.session.answer("c")
    assert (chat.sandbox.ended, chat.sandbox.restored) == ([0, 0], ["2"])


async def test_an_error_of_the_view_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError

    chat = ScriptedChat(ENDLESS)
    monkeypatch.setattr(chat.view, "add_tokens", lambda _: fail())
    others = asyncio.all_tasks()
    with pytest.raises(BrokenPipeError):
        await chat.session.answer("a")
    (turn,) = asyncio.all_tasks() - others
    await asyncio.wait({turn})
    assert turn.cancelled()


async def test_a_reset_starts_a_conversation_with_another_seed() -> None:
    chat = ScriptedChat(ANSWER, ANSWER)
    await chat.session.answer("a")
    await chat.session.reset()
    await chat.session.answer("a")
    first, second = chat.engine.requests
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.seed != second.seed
    assert (chat.sandbox.ended, chat.engine.released, first.sequence_id, second.sequence_id) == ([0], [0], 0, 1)
    assert len(chat.session.messages) == 2


# ---------------------------------------------------------------- user-defined tasks

ADD = ToolSchema(
    "add", "Add.", {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}
)
ADD_3 = f'{THOUGHT}<tool_call>{{"name": "add", "arguments": {{"amount": 3}}}}</tool_call>'
ROW = DatasetProblem("rows.jsonl:1", "", "", {"target": 3})


async def test_an_environment_gets_the_row_and_answers_the_calls() -> None:
    description = TaskDescription("environment", (ADD,), system="Count.")
    dialogue = build_dialogue_format(DialogueConfig(tools=()), description)
    outcomes = {"": Observation("Go to 3. At 0."), "add": Observation("At 3.", stop=True)}
    chat = ScriptedChat(ADD_3, outcomes=outcomes, row=ROW, kind="environment", dialogue=dialogue)
    assert (await chat.session.answer("Go to 3. ")).ending == "done"
    opened, called = chat.services.calls
    assert json.loads(opened.arguments) == {"target": 3, "question": "Go to 3. ", "ground_truth": ""}
    assert (called.method, called.arguments) == ("add", b'{"amount":3}')
    assert "user\nGo to 3. At 0.<|im_end|>" in chat.read_prompt(0)
    assert "[add] At 3.\n" in chat.view.text
    with pytest.raises(ChatRefused, match="the environment has ended"):
        await chat.session.answer("again")


async def test_a_dialogue_answers_each_turn_as_the_user() -> None:
    dialogue = build_dialogue_format(DialogueConfig(tools=()), TaskDescription("dialogue"))
    outcomes = {"": Observation("Play. Guess."), "step": Observation("Higher.")}
    chat = ScriptedChat("1", "2", outcomes=outcomes, row=ROW, kind="dialogue", dialogue=dialogue, max_turns=2)
    assert (await chat.session.answer("Play. ")).ending == "turns"
    assert "<reason>1<|im_end|>\n<|im_start|>user\nHigher.<|im_end|>" in chat.read_prompt(1)
    assert [message["role"] for message in chat.session.messages] == ["user", "assistant", "user", "assistant"]
    assert chat.view.text.startswith("[environment] Guess.\n<reason>1\n[user] Higher.\n")


async def test_the_error_of_a_tool_is_part_of_the_dialogue() -> None:
    dialogue = build_dialogue_format(DialogueConfig(tools=()), TaskDescription("tools", (ADD,)))
    chat = ScriptedChat(ADD_3, ANSWER, outcomes={"add": EnvironmentRaised("ValueError: no")}, dialogue=dialogue)
    assert (await chat.session.answer("a")).ending == "answered"
    assert "[add] Tool call failure\nValueError: no\n" in chat.view.text


async def test_an_interrupt_while_an_environment_opens_does_not_change_the_conversation() -> None:
    dialogue = build_dialogue_format(DialogueConfig(tools=()), TaskDescription("environment", (ADD,)))
    chat = ScriptedChat(ANSWER, outcomes={"": None}, row=ROW, kind="environment", dialogue=dialogue)
    answering = asyncio.ensure_future(chat.session.answer("Go."))
    await chat.services.endless_call_began.wait()
    chat.session.interrupt()
    end = await answering
    assert (end.ending, end.cause) == ("failed", "KeyboardInterrupt: interrupted by the user")
    assert (chat.session.messages, len(chat.services.calls)) == ([], 1)
