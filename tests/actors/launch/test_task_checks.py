"""A run refuses mistakes in [[tasks]] before it creates anything, and names the key of each mistake."""

import json
from pathlib import Path

import pytest

from asterism.actors.launch.checks.input_checks import check_inputs
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.tools.task_description import TaskDescription
from asterism.tasks import MATH_PYTHON
from tests.golden_messages import check_golden_messages

pytestmark = pytest.mark.slow

CODE = '''
from typing import Any

def lookup(query: str) -> str:
    """Look it up.

    Args:
        query: The words.
    """
    return query

def undocumented(query: str) -> str:
    return query

def untyped(query) -> str:
    """Look it up.

    Args:
        query: The words.
    """

def undescribed(query: str) -> str:
    """Look it up."""

def jupyter_code(code: str) -> str:
    """Run it.

    Args:
        code: It.
    """

number = 3
nothing = []
twice = [lookup, lookup]

class Maze:
    def __init__(self, width: int, height: int = 5, *, tags: list[str] = [], extra: Any = None, sandbox=None):
        pass

    def reset(self, **row):
        return ""

    def move(self, direction: str) -> str:
        """Move.

        Args:
            direction: Where.
        """

    def get_reward(self):
        return 1.0

class Unscored:
    def reset(self, **row):
        return ""

class Useless:
    def start(self):
        pass

class User:
    system = "Play."
    instruction = "Guess within {answer}: "

    def init(self, row):
        return ""

    def step(self, message):
        return ""

class BrokenServer:
    def reset(self):
        return ""

    def get_reward(self):
        return 1.0

    def describe_tools(self):
        raise ConnectionError("no server")

def score(completions):
    return [0.0]
'''
ROWS = [{"question": "What is 1 + 1?", "answer": "2"}, {"question": "What is 2 + 2?", "answer": "4"}]


class Inputs:
    """A folder with a task's code and rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "code.py").write_text(CODE)
        self.write_rows(ROWS)

    def write_rows(self, rows: list[dict[str, object]]) -> None:
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(self, name: str, *lines: str, dots: str = "") -> str:
        """Return a table of [[tasks]]. `dots` has nested tables of the task, such as "[tasks.dialogue]"."""
        return "\n".join(["[[tasks]]", f'name = "{name}"', 'data = "rows.jsonl"', *lines, dots, ""])

    def load(self, *tables: str, overrides: tuple[str, ...] = ()) -> RunConfig:
        path = self.folder / "run.toml"
        path.write_text(
            f'name = "r"\nruns_folder = "{self.folder}/runs"\nprepare.import = "asterism.tasks.tiny.prepare:TinyDemo"\n'
            + "\n".join(tables)
        )
        return load_run(path, ["evaluation.questions=0", *overrides])

    def check(self, *tables: str) -> dict[str, TaskDescription]:
        descriptions: dict[str, TaskDescription] = {}
        try:
            check_inputs(self.load(*tables), descriptions)
        finally:
            assert not (self.folder / "runs").exists()
        return descriptions


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path)


def import_path(name: str) -> str:
    return f'import = "code.py:{name}"'


def test_the_kinds_of_code_are_described(inputs: Inputs) -> None:
    described = inputs.check(
        inputs.write("a", import_path("lookup")),
        inputs.write("b", import_path("Maze"), "parameters = {width = 3, tags = ['x'], extra = {y = 1}}"),
        inputs.write("c", import_path("User")),
        inputs.write("d"),
    )
    kinds = {name: (each.kind, [tool.name for tool in each.tools]) for name, each in described.items()}
    assert kinds == {
        "a": ("tools", ["lookup"]),
        "b": ("environment", ["move"]),
        "c": ("dialogue", []),
        "d": ("tools", []),
    }
    user = build_dialogue_format(DialogueConfig(answer_open="[", answer_close="]"), described["c"])
    assert (user.system, user.instruction) == ("Play.", "Guess within [ ]: ")
    maze = build_dialogue_format(DialogueConfig(tools=()), described["b"])
    assert maze.system.startswith("You are a helpful assistant.\n\nYou may call")
    assert described["d"] == MATH_PYTHON


def test_each_mistake_in_a_task_is_refused_with_its_key_and_the_remedy(inputs: Inputs) -> None:
    """Each case in the file has lines of a task table; after ROW follows the only row of its data, if any."""
    (inputs.folder / "needy.py").write_text("import absent_package\n")
    (inputs.folder / "broken.py").write_text("1 / 0\n")

    def check(case: str) -> None:
        lines, _, row = case.partition(" ROW ")
        inputs.write_rows([json.loads(row)] if row else ROWS)
        inputs.check(inputs.write("t", lines))

    check_golden_messages(Path(__file__).parent / "task_messages.txt", check, {f"{inputs.folder}/": ""})


def test_a_variable_that_is_set_is_accepted(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "4711")
    assert "t" in inputs.check(inputs.write("t", import_path("lookup"), "variables = { KEY = '${PLANTED}' }"))


def test_an_environment_without_a_reward_may_have_reward_functions(inputs: Inputs) -> None:
    functions = '[tasks.reward.functions]\nr = "code.py:score"'
    assert inputs.check(inputs.write("t", import_path("Unscored"), functions))["t"].has_reward is False


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        ([import_path("Maze"), "parameters = {width = 3}"], {"level": 3}),
        ([import_path("User")], {"level": 3}),
        ([import_path("lookup"), '[tasks.reward.functions]\nr = "code.py:score"'], {"question": "What?"}),
    ],
)
def test_rows_that_no_grader_reads_need_no_answer(inputs: Inputs, lines: list[str], row: dict[str, object]) -> None:
    inputs.write_rows([row])
    assert inputs.check(inputs.write("t", *lines)).keys() == {"t"}


def test_a_missing_data_file_of_a_task_is_named_with_the_remedy(inputs: Inputs) -> None:
    (inputs.folder / "rows.jsonl").unlink()
    with pytest.raises(UnusableInput, match=r"^tasks\.t\.data: .*rows\.jsonl: no such file; set tasks\.t\.data to"):
        inputs.check(inputs.write("t"))


# ---------------------------------------------------------------- the file


def test_an_override_changes_the_task_with_that_name(inputs: Inputs) -> None:
    tables = (inputs.write("a"), inputs.write("b", "weight = 3"))
    run = inputs.load(*tables, overrides=("tasks.b.weight=2", "tasks.a.dialogue.max_turns=7"))
    assert [task.weight for task in run.resolved_tasks] == [1.0, 2.0]
    assert [task.get_dialogue().max_turns for task in run.resolved_tasks] == [7, 10]
