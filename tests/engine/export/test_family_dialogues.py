"""Tests: a family's exported template gives the token ids of a run with dialogue.renderer, with stated differences.

The differences are reasoning of earlier turns, special tokens in untrusted texts, and blanks at the ends of turns.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from asterism.policies.tools.python_tools import TOOL_SCHEMAS
from tests.engine.export.exported_chats import render
from tests.engine.export.family_runs import CONFIGS, FamilyRun, make_family_dialogue, make_family_run
from tests.engine.export.random_dialogues import Message, make_text

NUM_DIALOGUES = 100  # number for each configuration
# Numbers of dialogues with calls and results, of prompts that equal those of the run, and of all prompts.
COUNTS = {
    "qwen3": (90, 234, 405),
    "qwen3 quick": (88, 100, 410),
    "llama3": (88, 391, 391),
    "llama3 later": (88, 391, 391),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_family_template_renders_the_token_ids_of_the_run(tmp_path: Path, name: str) -> None:
    """The prompt of each turn and the whole dialogue agree, except for the reasoning of earlier turns."""
    run = make_family_run(tmp_path, name)
    num_called = num_equal = num_prompts = 0
    for seed in range(NUM_DIALOGUES):
        messages = make_family_dialogue(run, seed, make_text)
        trained, turns = run.train(messages)
        num_called += any(message["role"] == "tool" for message in messages)
        num_prompts += len(turns)
        for turn in turns:
            expected = run.expect_prompt(trained, turn)
            assert render(run.exported, messages[: turn.place], add_generation_prompt=True) == expected
            num_equal += expected == trained[: turn.start]
        assert render(run.exported, messages) == run.expect_whole(trained, turns[-1], messages[-1])
    assert (num_called, num_equal, num_prompts) == COUNTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama3", "llama3 later"])
def test_the_templates_of_these_tests_render_like_the_package(tmp_path: Path, name: str) -> None:
    """The package is tested against the published templates. It deviates with `enable_thinking = false`."""
    run = make_family_run(tmp_path, name)
    dialogue = run.renderer.dialogue
    tools = [{"type": "function", "function": tool._asdict()} for tool in dialogue.tools]
    for seed in range(20):
        question, *others = make_family_dialogue(run, seed, make_text)
        system = {"role": "system", "content": dialogue.system}
        asked = {"role": "user", "content": dialogue.instruction + question["content"]}
        assert render(run.exported, [question, *others]) == run.package.render_ids(
            [system, asked, *others], tools=tools
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_of_the_family_differ_from_the_run_only_after_removed_reasoning(tmp_path: Path, name: str) -> None:
    """The prompts equal the run's prompts up to the second question, even with reasoning before the first call."""
    run = make_family_run(tmp_path, name)
    call = {"function": {"name": "jupyter_code", "arguments": {"code": "1 + 1"}}}
    reasoning = {"reasoning_content": "I add."} if run.thinks else {}
    messages: list[Message] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call], **reasoning},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2.", **reasoning},
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "Yes.", **reasoning},
    ]
    trained, turns = run.train(messages)
    prompts = [render(run.exported, messages[: turn.place], add_generation_prompt=True) for turn in turns]
    same = [prompt == trained[: turn.start] for prompt, turn in zip(prompts, turns, strict=True)]
    assert same == [True, not run.is_quick, run.is_llama]
    schemas = [TOOL_SCHEMAS["jupyter_code"]._asdict()]
    tools = [{"type": "function", "function": schema} for schema in schemas]
    assert render(run.exported, messages[:1], tools, add_generation_prompt=True) == prompts[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_template_encodes_special_tokens_in_untrusted_texts(tmp_path: Path, name: str) -> None:
    """The prompts of template and run have equal text. Only the template encodes special tokens in untrusted texts."""
    run = make_family_run(tmp_path, name)
    num_hostile = 0
    for seed in range(20):
        messages = make_family_dialogue(run, seed, make_hostile)
        trained, turns = run.train(messages)
        for turn in turns:
            prompt = render(run.exported, messages[: turn.place], add_generation_prompt=True)
            expected = run.expect_prompt(trained, turn)
            assert prompt == run.encode(run.tokenizer.decode(expected))
            is_hostile = has_special(run, messages[: turn.place])
            assert (prompt != expected) == is_hostile
            num_hostile += is_hostile
    assert num_hostile > 10


def make_hostile(draw: Random) -> str:
    return make_text(draw, is_hostile=True)


def has_special(run: FamilyRun, messages: list[Message]) -> bool:
    texts = [message["content"] for message in messages if message["role"] != "assistant"]
    return any(special in text for special in run.tokenizer.added_tokens for text in texts)


def test_the_template_removes_blanks_at_the_ends_of_turns(tmp_path: Path) -> None:
    """Qwen3's template strips line breaks around reasoning in the last turns. Llama 3's strips blanks around texts."""
    call: dict[str, Any] = {"function": {"name": "jupyter_code", "arguments": {"code": "1 + 1"}}}
    question, result = {"role": "user", "content": "1 + 1?"}, {"role": "tool", "content": "2"}
    qwen = make_family_run(tmp_path / "qwen", "qwen3")
    for reasoning, content, is_same in (
        ("I add.", " It: ", True),
        ("\nI add.\n", " It: ", False),
        ("I add.", "\nIt", False),
    ):
        turn = {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": [call]}
        trimmed = {**turn, "reasoning_content": reasoning.strip("\n"), "content": content.lstrip("\n")}
        prompt = render(qwen.exported, [question, turn, result], add_generation_prompt=True)
        answer = {"role": "assistant", "content": "2"}
        for each, equals in ((turn, is_same), (trimmed, True)):
            trained, turns = qwen.train([question, each, result, answer])
            assert (trained[: turns[-1].start] == prompt) == equals
    llama = make_family_run(tmp_path / "llama", "llama3")
    for content in ("2", " 2\n"):
        messages = [
            question,
            {"role": "assistant", "content": content},
            question,
            {"role": "assistant", "content": "2"},
        ]
        trained, turns = llama.train(messages)
        prompt = render(llama.exported, messages[:3], add_generation_prompt=True)
        assert (trained[: turns[-1].start] == prompt) == (content == "2")
