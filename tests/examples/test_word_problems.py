"""Word problems: three disjoint sets of templates, right answers, and cold-start dialogues with the tool's true results.

docs/word_problems.md describes the example.
"""

import ast
import builtins
import hashlib
import importlib
import json
import re
import sys
from collections import Counter
from fractions import Fraction
from itertools import combinations, cycle, islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import asdict

from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.data.sft_dialogues import count_sft_dialogues
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.parse_turn import MalformedCall, parse_assistant_turn
from asterism.policies.dialogue.tool_results import format_malformed_call, format_result
from asterism.tasks.math_python import MATH_PYTHON
from asterism.tasks.prepare_program import load_program, prepare_run
from tests.sandbox.conftest import open_sandbox

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "word_problems"
RUN = load_run(EXAMPLE / "word_problems.toml")
DIALOGUE = RUN.resolved_tasks[0].get_dialogue()
FORMAT = build_dialogue_format(DIALOGUE, MATH_PYTHON)
LIMIT = DIALOGUE.result_characters

prepare: Any = sys.modules[type(load_program(RUN)).__module__]  # its import adds the example's folder to sys.path
templates: Any = importlib.import_module("problem_templates")
programs: Any = importlib.import_module("word_programs")
dialogues: Any = importlib.import_module("word_dialogues")
SETS: dict[str, Any] = prepare.SETS
ALL = [(name, template) for name, group in SETS.items() for template in group]
COMPOSED = list(islice(importlib.import_module("templates_composed").compose_templates(Random(0)), 1500))
PEOPLE = {*templates.WOMEN, *templates.MEN}
OPERATORS = {ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.FloorDiv: "__truediv__"}
UNIT = re.compile(
    r"\b(how many [a-z]+|number of [a-z]+|in (dollars|minutes|hours|kilometers|kilograms|centimeters))\b", re.IGNORECASE
)
ASKS = re.compile(r"(Find|Give) |.*\?$")  # a sentence that asks


def draw(template: Any, count: int, seed: int = 0) -> list[Any]:
    random = Random(seed)
    return [templates.draw_problem(random, template) for _ in range(count)]


def compute_exactly(node: ast.expr, numbers: dict[str, int]) -> Fraction:
    """Evaluate an expression of a template with fractions; `//` divides exactly."""
    match node:
        case ast.BinOp():
            left, right = compute_exactly(node.left, numbers), compute_exactly(node.right, numbers)
            return getattr(left, OPERATORS[type(node.op)])(right)
        case ast.Name():
            return Fraction(numbers[node.id])
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case _:
            raise AssertionError(ast.dump(node))


def match_template(template: Any, question: str) -> dict[str, int] | None:
    """Read the numbers from a question's text, without the generator's record of them. None if no such template."""
    groups = dict[str, str]()

    def make_group(field: str) -> str:
        if field not in template.numbers:
            return r"\w+"
        repeated = field in groups
        groups[field] = field
        return rf"(?P={field})" if repeated else rf"(?P<{field}>\d+)"

    pieces = re.split(r"\{(\w+)\}", template.text)
    pattern = "".join(make_group(piece) if n % 2 else re.escape(piece) for n, piece in enumerate(pieces))
    found = re.fullmatch(pattern, question)
    return None if found is None else {name: int(value) for name, value in found.groupdict().items()}


def find_template(question: str) -> str | None:
    """Find the text of the template of a question. None: the template is composed."""
    return next((each.text for _, each in ALL if match_template(each, question) is not None), None)


def test_three_sets_have_168_different_templates() -> None:
    assert {name: len(group) for name, group in SETS.items()} == {"cold_start": 120, "rl_only": 24, "test_only": 24}
    assert len({template.text for _, template in ALL}) == len(ALL)
    assert len({template.family for _, template in ALL}) >= 10
    for name, group in SETS.items():
        assert sum(bool(template.distractors) for template in group) >= len(group) / 8, name
        assert sum(bool(re.search(r"\b(7|60|100|1000)\b", template.answer)) for template in group) >= len(group) / 10, (
            name
        )
    operations = Counter(len(re.findall(r"//|[-+*]", template.answer)) for _, template in ALL)
    assert set(operations) == {1, 2, 3, 4}


def test_the_structure_of_an_answer_ignores_names_and_order() -> None:
    derive = templates.derive_structure
    assert derive("a * b + c") == derive("x + 60 * y") != derive("(a + b) * c")
    assert derive("a - b - c") == derive("a - (c + b)") != derive("a - b + c")
    assert derive("a // b // c") == derive("a // (b * c)") != derive("a // (b - c)")


def test_structures_of_the_test_set_occur_in_no_other_set() -> None:
    """The cold start may contain RL's structures, since a small model must see many of them to learn what a text means:
    only the sentences of rl_only are new to RL. The structures of the test stay new."""
    composed = {templates.derive_structure(each.answer) for each in COMPOSED}
    structures = {name: {templates.derive_structure(each.answer) for each in group} for name, group in SETS.items()}
    assert not structures["test_only"] & (structures["cold_start"] | structures["rl_only"] | composed)
    assert len(composed) > 60
    assert {name: len(each) for name, each in structures.items()} == {"cold_start": 34, "rl_only": 11, "test_only": 15}


def test_no_two_sets_share_six_words_in_a_row() -> None:
    """The test set does not even share five words, so its sentences have frames of their own."""
    texts = {
        name: [
            text
            for each in group
            for text in (each.text, *(problem.question for problem in draw(each, 40 if each in SETS[name] else 1)))
        ]
        for name, group in (SETS | {"cold_start": (*SETS["cold_start"], *COMPOSED)}).items()
    }
    for first, second in combinations(SETS, 2):
        size = 5 if "test_only" in (first, second) else 6
        grams = [set().union(*(templates.list_ngrams(text, size) for text in texts[name])) for name in (first, second)]
        assert grams[0] & grams[1] == set(), (first, second)


@pytest.mark.parametrize("name", [*SETS, "composed"])
def test_questions_are_complete_and_answers_are_exact(name: str) -> None:
    group, count = (SETS[name], 60) if name in SETS else (COMPOSED[:400], 5)
    for template in group:
        for problem in draw(template, count):
            numbers = match_template(template, problem.question)
            assert numbers is not None and numbers == problem.numbers, problem.question
            assert compute_exactly(ast.parse(template.answer, mode="eval").body, numbers) == problem.answer
            assert set(templates.list_names(template.answer)) <= set(numbers)  # the question has all that is needed
            assert min(numbers.values()) >= 2 and len({*numbers.values()}) == len(numbers)
            assert 2 <= problem.answer <= 5000
            assert re.fullmatch(r"[A-Z\d][^{}]*[?.]", problem.question)
            assert not re.search(r"\b[Aa] [aeiou]|\s\s", problem.question)


def test_composed_questions_have_many_words_and_few_are_alike() -> None:
    texts = [re.sub(r"\{\w+\}", "N", each.text) for each in COMPOSED]
    assert len(set(texts)) > 0.99 * len(texts)
    assert not any(re.search(r"[][<>|]", text) for text in texts)
    assert len({word.lower() for text in texts for word in re.findall(r"\w+", text)}) > 600
    assert len({each.family for each in COMPOSED}) == 5
    assert 0.05 < sum(bool(each.distractors) for each in COMPOSED) / len(COMPOSED) < 0.2


def test_no_number_has_the_name_of_a_builtin_function() -> None:
    """A program that lacks such a variable would not raise NameError."""
    assert not {name for _, template in ALL for name in template.numbers if hasattr(builtins, name)}


@pytest.mark.parametrize(("name", "template"), ALL)
def test_a_question_names_the_unit_of_its_answer(name: str, template: Any) -> None:
    (asked,) = filter(ASKS.match, re.split(r"(?<=[.?]) ", template.text))
    assert UNIT.search(asked), f"{name}: {asked}"


def test_the_test_templates_are_frozen() -> None:
    """A change of the templates must also change the recorded digest, so that it is visible."""
    digest, name = (EXAMPLE / "templates_test.sha256").read_text().split()
    assert hashlib.sha256((EXAMPLE / name).read_bytes()).hexdigest() == digest


# ---------------------------------------------------------------- dialogues


def draw_dialogue_problems(count: int, seed: int = 0) -> list[Any]:
    random = Random(seed)
    return list(
        islice(prepare.draw_problems(random, prepare.stream_templates(random, "cold_start"), "dialogues"), count)
    )


def generate(count: int = 480, **options: Any) -> list[Any]:
    problems = draw_dialogue_problems(count)
    return dialogues.generate_dialogues(Random(0), problems, FORMAT, LIMIT, **options)


def list_codes(message: dict[str, Any]) -> list[str]:
    return [json.loads(call["function"]["arguments"])["code"] for call in message.get("tool_calls", ())]


def list_results(messages: Any) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def count_calls(messages: Any) -> tuple[int, int]:
    results = list_results(messages)
    return len(results), sum(result.startswith("Tool call failure") for result in results)


def read_answer(messages: Any) -> str:
    turn = parse_assistant_turn(messages[-1]["content"], FORMAT)
    assert (turn.answer_opens, turn.answer_closes, turn.answer_spans) == (1, 1, 1)
    assert turn.answer is not None
    return turn.answer


@pytest.mark.slow
def test_dialogues_have_the_configured_shares_and_their_answers() -> None:
    problems = draw_dialogue_problems(1200)
    generated = dialogues.generate_dialogues(Random(0), problems, FORMAT, LIMIT)
    shares = dialogues.WORD_SHARES
    counted = Counter(map(count_calls, generated))
    silent = shares.repaired * dialogues.SILENT_SHARE
    expected = {
        (0, 0): shares.guess,
        (1, 0): shares.clean + shares.wrong,
        (1, 1): shares.gives_up,
        (2, 0): silent,
        (2, 1): shares.repaired - silent + shares.malformed,
    }
    assert {key: number / 1200 for key, number in counted.items()} == pytest.approx(expected, abs=0.04)
    right = [read_answer(each) == str(problem.answer) for each, problem in zip(generated, problems, strict=True)]
    assert sum(right) / 1200 == pytest.approx(shares.clean + shares.repaired + shares.malformed, abs=0.04)
    assert all(
        is_right == (len(list_results(each)) == 2) or count_calls(each) == (1, 0)
        for is_right, each in zip(right, generated, strict=True)
    )


@pytest.mark.parametrize("behavior", asdict(dialogues.WORD_SHARES))
def test_every_behavior_can_be_alone(behavior: str) -> None:
    shares = dialogues.BehaviorShares(**dict.fromkeys(asdict(dialogues.WORD_SHARES), 0.0) | {behavior: 1})
    problems = draw_dialogue_problems(72, seed=1)
    generated = dialogues.generate_dialogues(Random(1), problems, FORMAT, LIMIT, shares=shares)
    right = {read_answer(each) == str(problem.answer) for each, problem in zip(generated, problems, strict=True)}
    assert right == {behavior in ("clean", "repaired", "malformed", "reasoned")}


def test_a_dialogue_shows_the_true_results_of_its_calls() -> None:
    styles = set[str]()
    for messages in generate():
        notebook = programs.Notebook()
        printed = list_results(messages)[-1:]
        for call, result in pairwise(messages):
            for code in list_codes(call):
                assert result["content"] == format_result(notebook.run(code), LIMIT)
                styles.add(re.sub(r"\d+", "0", re.sub(r"[a-z]+\d?", "x", code)))
            for parsed in parse_assistant_turn(call["content"], FORMAT).calls if result["role"] == "tool" else ():
                assert isinstance(parsed, MalformedCall)
                assert result["content"] == format_malformed_call(parsed, LIMIT)
        if printed and "success" in printed[0]:
            assert float(printed[0].split("\n")[-1]) == float(read_answer(messages))
    assert len(styles) > 100  # the cold start leaves something to explore


def test_most_programs_have_one_line_for_each_operation() -> None:
    random, styles = Random(0), Counter[str]()
    for template in SETS["cold_start"]:
        for problem in draw(template, 10):
            first = programs.write_program(random, template.answer, problem.numbers).split("\n")[0]
            styles["bare" if "=" not in first else "steps" if re.search(r"[-+*/]", first) else "named"] += 1
    shares = {style: number / styles.total() for style, number in styles.items()}
    assert shares == pytest.approx({"named": 0.2, "steps": 0.7, "bare": 0.1}, abs=0.03)


def test_no_failing_program_has_a_path_in_its_result() -> None:
    failures = [result for each in generate() for result in list_results(each) if "failure" in result]
    assert len(failures) > 100
    assert not any("/" in result for result in failures)


@pytest.mark.slow
@pytest.mark.real_clock
async def test_the_sandbox_returns_the_same_results() -> None:
    generated = generate(72)
    async with open_sandbox("process") as client:
        for number, messages in enumerate(generated):
            for call, result in pairwise(messages):
                for code in list_codes(call):
                    assert result["content"] == format_result((await client.cell(code, number)).outcome, LIMIT)


def test_reasoning_only_adds_sentences_before_the_first_call() -> None:
    for short, long in zip(generate(120), generate(120, reasoning=True), strict=True):
        added = long[1]["content"].removesuffix(short[1]["content"]).strip()
        assert re.fullmatch(r"Let me think about the problem\. We know that .*= \d+\.", added)
        assert [short[0], *short[2:]] == [long[0], *long[2:]]
        for left, right in re.findall(r", ([\d+*/ -]+) = (\d+)\.", added):
            assert eval(left) == int(right), added


# ---------------------------------------------------------------- files


def write_files(folder: Path, **changes: Any) -> dict[str, list[dict[str, Any]]]:
    sizes = {"num_train_questions": 480, "num_test_questions": 120, "num_sft_dialogues": 720}
    overrides = {f"prepare.parameters.{key}": value for key, value in sizes.items()} | changes
    run = load_run(EXAMPLE / "word_problems.toml", [f"{key}={value}" for key, value in overrides.items()])
    prepare_run(run, RunFolder(folder))
    files = (folder / "data").iterdir()
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


@pytest.mark.slow
def test_the_files_share_no_numbers_and_only_training_depends_on_the_seed(tmp_path: Path) -> None:
    first, again, other = (write_files(tmp_path / str(n), seed=seed) for n, seed in enumerate((0, 0, 1)))
    assert first == again
    assert {name for name in first if first[name] == other[name]} == {f"test_{name}.jsonl" for name in SETS}
    people = re.compile("|".join(rf"\b{name}\b" for name in PEOPLE))
    questions = {
        name: {people.sub("N", row.get("question") or row["messages"][0]["content"]) for row in rows}
        for name, rows in first.items()
    }
    assert all(questions[one].isdisjoint(questions[two]) for one, two in combinations(questions, 2))
    assert all(len(rows) == size for rows, size in ((first["train.jsonl"], 480), (first["test_rl_only.jsonl"], 120)))
    assert count_sft_dialogues(tmp_path / "0" / "data" / "sft.jsonl", {"word_problems": FORMAT}, 1000) == 720


@pytest.mark.slow
def test_each_trained_set_has_half_of_the_questions_and_each_template_equally_many_dialogues(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    trained = Counter(find_template(row["question"]) for row in files["train.jsonl"])
    of_rl = [trained[each.text] for each in SETS["rl_only"]]
    assert of_rl == pytest.approx([10] * 24, abs=2)  # questions that repeat are left out
    assert 70 < sum(trained[each.text] for each in SETS["cold_start"]) < 90  # a third; the others are composed
    dialogues_of = Counter(
        found for row in files["sft.jsonl"] if (found := find_template(row["messages"][0]["content"]))
    )
    assert len(dialogues_of) == 120 and {*dialogues_of.values()} <= {2, 3}  # a composed template can lack numbers
    asked = files["test_cold_start.jsonl"][: RUN.evaluation.questions]  # an evaluation asks the first questions
    assert len({re.sub(r"\d+", "N", row["question"]) for row in asked}) == len(asked)
    assert len({row["family"] for row in asked}) >= 10


def test_the_configuration_evaluates_each_set_with_four_answers_per_question() -> None:
    sets = {each.name: each for each in RUN.resolved_evaluation_sets}
    assert {name: each.data for name, each in sets.items()} == {name: f"$RUN/data/test_{name}.jsonl" for name in SETS}
    assert {each.samples for each in sets.values()} == {4}


def test_unsuitable_parameters_are_refused() -> None:
    walk = next(each for each in SETS["cold_start"] if "walks the dog" in each.text)
    with pytest.raises(UnusableInput, match=r"num_test_questions = 60: only about \d+ distinct questions exist"):
        prepare.draw_distinct(Random(0), cycle((walk,)), "test", 60)
    run = load_run(
        EXAMPLE / "word_problems.toml", ['dialogue.tools=["python_code_with_standard_io"]', 'dialogue.system="{tools}"']
    )
    with pytest.raises(UnusableInput, match=r'dialogue.tools: the dialogues call only \["jupyter_code"\]'):
        load_program(run).check(run)
