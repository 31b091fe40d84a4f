"""A run refuses mistakes in [[tasks]] before it creates anything, each named by its key."""

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
        """Return a table of [[tasks]]. `dots` are tables of the task, such as "[tasks.dialogue]"."""
        return "\n".join(["[[tasks]]", f'name = "{name}"', 'data = "rows.jsonl"', *lines, dots, ""])

    def load(self, *tables: str, overrides: tuple[str, ...] = ()) -> RunConfig:
        path = self.folder / "run.toml"
        path.write_text(f'name = "r"\nruns_folder = "{self.folder}/runs"\n[tiny]\n' + "\n".join(tables))
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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ['import = "code"'],
            'tasks.t.import: "code" is no import path; expected "package.module:name" or "file.py:na',
        ),
        (['import = "code.py:"'], 'tasks.t.import: "{folder}/code.py:" is no import path'),
        (['import = "absent.py:x"'], "tasks.t.import: {folder}/absent.py: no such file"),
        (['import = "absent_package.module:x"'], "tasks.t.import: no module absent_package; is it installed"),
        ([import_path("lokup")], 'tasks.t.import: {folder}/code.py has no "lokup"; did you mean "lookup"?'),
        (
            [import_path("number")],
            "tasks.t.import: 3 is no function; expected a function, a list of functions, a class",
        ),
        ([import_path("nothing")], "tasks.t.import: the list has no functions"),
        ([import_path("twice")], 'tasks.t.import: two tools have the name "lookup"; rename one'),
        ([import_path("Useless")], "tasks.t.import: the class Useless has no `reset`; expected a function"),
        ([import_path("undocumented")], "tasks.t.import: undocumented: a tool is a function with a Google docstring"),
        ([import_path("untyped")], "tasks.t.import: untyped, parameter 'query': it has no type annotation"),
        ([import_path("undescribed")], "tasks.t.import: undescribed, parameter 'query': it has no description"),
        (
            [import_path("jupyter_code")],
            'tasks.t.import: the name "jupyter_code" is that of a Python tool; use another',
        ),
        ([import_path("lookup"), "parameters = {x = 1}"], "tasks.t.parameters: only a class takes parameters"),
        ([import_path("Maze")], "tasks.t.parameters.width: missing; Maze needs it"),
        (
            [import_path("Maze"), "parameters = {width = 3, hight = 2}"],
            "tasks.t.parameters.hight: Maze has no such parameter; it has width, height, tags, extra",
        ),
        (
            [import_path("Maze"), 'parameters = {width = "3"}'],
            "tasks.t.parameters.width: Expected `int`, got `str`",
        ),
        (
            [import_path("Maze"), "parameters = {width = 3, tags = [1]}"],
            "tasks.t.parameters.tags: Expected `str`, got `int`",
        ),
        (
            [import_path("Unscored")],
            "tasks.t.import: {folder}/code.py:Unscored has no `get_reward`, and tasks.t.reward.functions names no",
        ),
        ([import_path("BrokenServer")], "tasks.t.import: describe_tools raised ConnectionError: no server"),
        (
            [import_path("User"), '[tasks.dialogue]\ntools = ["jupyter_code"]'],
            "tasks.t.import: {folder}/code.py:User is a dialogue, which has no tools; remove tasks.t.dialogue.tools",
        ),
        (
            [import_path("User"), '[tasks.dialogue]\nsystem = "{{tools}}"'],
            "tasks.t.import: {folder}/code.py:User has no tools, but tasks.t.dialogue.system contains {{tools}}",
        ),
        (
            [import_path("lookup"), 'python = "absent/python"'],
            "tasks.t.python: {folder}/absent/python: no such file",
        ),
        (
            [import_path("lookup"), '[tasks.reward.functions]\nr = "code.py:scored"'],
            'tasks.t.reward.functions.r: {folder}/code.py has no "scored"; did you mean "score"?',
        ),
    ],
)
def test_a_mistake_in_a_task_is_named_by_its_key(inputs: Inputs, lines: list[str], message: str) -> None:
    lines = [line.replace("{{", "{").replace("}}", "}") for line in lines]
    with pytest.raises(UnusableInput) as error:
        inputs.check(inputs.write("t", *lines))
    assert message.format(folder=inputs.folder) in str(error.value)
    assert str(error.value).startswith("tasks.t.")


def test_an_unset_variable_is_named_with_its_key(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    table, lines = "variables = { KEY = '${PLANTED}' }", [import_path("lookup")]
    with pytest.raises(
        UnusableInput, match=r"^tasks\.t\.variables: KEY: the environment variable PLANTED is not set; "
    ):
        inputs.check(inputs.write("t", *lines, table))
    monkeypatch.setenv("PLANTED", "4711")
    assert "t" in inputs.check(inputs.write("t", *lines, table))


def test_a_missing_package_is_named(inputs: Inputs) -> None:
    (inputs.folder / "needy.py").write_text("import absent_package\n")
    with pytest.raises(UnusableInput) as error:
        inputs.check(inputs.write("t", 'import = "needy.py:x"'))
    needy = inputs.folder / "needy.py"
    assert str(error.value) == f"tasks.t.import: {needy} needs the module absent_package, which is not installed"


def test_an_error_of_the_code_is_an_error_of_the_key_import(inputs: Inputs) -> None:
    (inputs.folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UnusableInput, match=r"^tasks\.t\.import: .* cannot be imported: ZeroDivisionError: division"):
        inputs.check(inputs.write("t", 'import = "broken.py:x"'))


def test_an_environment_without_a_reward_may_have_reward_functions(inputs: Inputs) -> None:
    functions = '[tasks.reward.functions]\nr = "code.py:score"'
    assert inputs.check(inputs.write("t", import_path("Unscored"), functions))["t"].has_reward is False


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("lines", "rows", "message"),
    [
        ([], [{"question": "What?"}], "tasks.t.data: {folder}/rows.jsonl: row 1"),
        ([], [{"answer": "2"}], "tasks.t.data: {folder}/rows.jsonl: row 1"),
        ([import_path("lookup")], [{"question": "What?"}], "tasks.t.data: {folder}/rows.jsonl: row 1"),
        (
            [import_path("lookup"), '[tasks.reward.functions]\nr = "code.py:score"'],
            [{"level": 3}],
            "tasks.t.data: {folder}/rows.jsonl: row 1",
        ),
        (
            [import_path("Unscored"), '[tasks.reward.functions]\nr = "math"'],
            [{"level": 3}],
            "tasks.t.data: {folder}/rows.jsonl: row 1",
        ),
    ],
)
def test_graded_rows_need_a_question_and_an_answer(
    inputs: Inputs, lines: list[str], rows: list[dict[str, object]], message: str
) -> None:
    inputs.write_rows(rows)
    with pytest.raises(UnusableInput) as error:
        inputs.check(inputs.write("t", *lines))
    assert str(error.value).startswith(message.format(folder=inputs.folder))


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
