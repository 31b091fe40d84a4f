"""A chat loads its parts: configuration, task, tokenizer and limits; a user's task runs in its host process."""

from pathlib import Path
from typing import Any

import pytest

from asterism.actors.cli.chat.chat_session import ChatSampling, ChatSession
from asterism.actors.cli.chat.chat_setup import ChatOptions, ChatParts, build_services, load_parts
from asterism.actors.engines.checkpoint_argument import parse_checkpoint_argument
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.tasks.checking.task_check import write_byte_tokenizer
from asterism.tasks.solo_driver import SoloTask
from tests.actors.cli.chat.scripted_chats import RecordedView, ScriptedEngine, ScriptedSandbox
from tests.engine.data.cold_start_rows import write_rows

COUNTER = '''
class Counter:
    def __init__(self, step=1):
        self.step = step

    def reset(self, target, question, **row):
        self.count = 0
        return f" The counter is at 0, and the target is {target}."

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: A number.
        """
        self.count += self.step * amount
        return f"The counter is at {self.count}."

    def get_reward(self):
        return 0.0
'''
CONFIG = """
name = "counting"
sandbox.backend = "process"

[[tasks]]
name = "counter"
import = "counter.py:Counter"
data = "targets.jsonl"
parameters = { step = 2 }
dialogue = { response_tokens = 1000, max_turns = 5 }

[[tasks]]
name = "math"
data = "targets.jsonl"
"""
URL = "http://127.0.0.1:9/v1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "counter.py").write_text(COUNTER)
    (tmp_path / "run.toml").write_text(CONFIG)
    rows = ({"target": target, "question": "", "answer": "1"} for target in (3, 7))
    write_rows(tmp_path / "targets.jsonl", *rows)
    write_byte_tokenizer(tmp_path, DialogueConfig())
    return tmp_path


def load(folder: Path, **changes: Any) -> ChatParts:
    unset = {**dict.fromkeys(ChatOptions._fields), "sampling": {}}
    given = {"config": folder / "run.toml", "tokenizer": folder, "overrides": (), "task": "counter", "row": 0}
    return load_parts(parse_checkpoint_argument(URL), ChatOptions(**{**unset, **given, **changes}))


@pytest.mark.real_clock
@pytest.mark.slow
async def test_a_task_of_the_user_answers_calls_in_its_host_process(folder: Path) -> None:
    parts = load(folder, row=1, max_turns=3)
    assert (parts.rules.max_turns, parts.rules.response_tokens, parts.rules.kind) == (3, 1000, "environment")
    add = '</reason><tool_call>{"name": "add", "arguments": {"amount": 4}}</tool_call>'
    answer = "</reason><answer>8</answer>"
    engine, sandbox = ScriptedEngine([add, answer, add, answer], parts.tokenizer), ScriptedSandbox()
    view, services = RecordedView(parts.tokenizer), build_services(parts, sandbox)
    task = SoloTask(parts.task.name, parts.rules, parts.tokenizer, services, sandbox)
    session = ChatSession(task, parts.row, engine, ChatSampling(Sampling(), 0), 5000, view)  # pyright: ignore[reportArgumentType]
    try:
        assert (await session.answer("Count.")).ending == "answered"
        assert "[environment]  The counter is at 0, and the target is 7.\n" in view.text
        assert "[add] The counter is at 8.\n" in view.text
        assert (await session.answer("More.")).ending == "answered"
        assert "[add] The counter is at 16.\n" in view.text
    finally:
        await session.close()
        await services.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": ""}, "--task: name the task; the configuration has counter, math"),
        ({"task": "other"}, "--task other: there is no such task; the configuration has counter, math"),
        ({"config": None, "task": "", "tokenizer": None}, "add --tokenizer FOLDER, or --config FILE"),
        pytest.param({"row": 2}, r"--row 2: .*targets.jsonl has fewer rows", marks=pytest.mark.slow),
    ],
)
def test_a_missing_task_tokenizer_or_row_is_named(changes: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(UnusableInput, match=message):
        load(folder, **changes)


@pytest.mark.slow
def test_a_run_and_a_chat_number_rows_alike(folder: Path) -> None:
    """Runs and chats do not count unusable rows."""
    path = folder / "targets.jsonl"
    path.write_text("{\n" + path.read_text())
    row = load(folder, row=1).row
    assert row is not None and row.fields["target"] == 7


def test_a_server_without_a_configuration_has_the_default_texts_and_the_given_limits(folder: Path) -> None:
    parts = load(folder, config=None, task="", max_tokens=77, overrides=("dialogue.max_turns=3",))
    assert (parts.rules.max_turns, parts.rules.response_tokens, parts.row) == (3, 77, None)
    assert [tool.name for tool in parts.rules.dialogue.tools] == ["jupyter_code", "python_code_with_standard_io"]
    assert parts.run.sandbox.spare_notebooks == 0
