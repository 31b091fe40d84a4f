"""The program for [prepare] that writes word problems and dialogues below the run's folder (docs/word_problems.md).

data/train.jsonl                        questions of the sets cold_start and rl_only, in equal numbers
data/sft.jsonl                          dialogues on questions of the set cold_start
data/test_{cold_start,rl_only,test_only}.jsonl   questions of each set, which are the same for every seed

No two of these files share the numbers of a template.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, cycle, islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import templates_cold_start
import templates_cold_start_home
import templates_cold_start_money
import templates_cold_start_outside
import templates_rl
import templates_test
from problem_templates import NoSuitableNumbers, Problem, Template, draw_problem
from templates_composed import compose_templates
from word_dialogues import WORD_SHARES, generate_dialogues
from word_programs import write_derivation

from asterism.configs.atomic_write import replacing_file
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import PositiveInt
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.seeded_random import draw_uniform
from asterism.tasks.math_python import MATH_PYTHON
from asterism.tasks.prepare_program import PrepareProgram
from asterism.tasks.tiny.cold_start_dialogues import TOOL, BehaviorShares

Part = Literal["test", "dialogues", "train"]

_COLD_START = (
    *templates_cold_start.TEMPLATES,
    *templates_cold_start_home.TEMPLATES,
    *templates_cold_start_money.TEMPLATES,
    *templates_cold_start_outside.TEMPLATES,
)
SETS = {
    # This order mixes the families, because an evaluation asks only the first questions of a file.
    "cold_start": tuple(sorted(_COLD_START, key=lambda template: zlib.crc32(template.text.encode()))),
    "rl_only": templates_rl.TEMPLATES,
    "test_only": templates_test.TEMPLATES,
}
TEST_SEED = 0
_COMPOSED = 2  # composed templates for each of the other templates of the cold start
_MOST_DRAWS = 50  # draws of a template's numbers for one file


class WordProblems(PrepareProgram, frozen=True):
    """The parameters of the program."""

    num_train_questions: PositiveInt = 1920
    num_test_questions: PositiveInt = 240  # questions of each set
    num_sft_dialogues: PositiveInt = 3600
    behaviors: BehaviorShares = WORD_SHARES  # frequencies of behaviors in the dialogues
    reasoning: bool = False  # add sentences of reasoning to the dialogues

    def check(self, run: RunConfig) -> None:
        """Raise UnusableInput for tools that the dialogues do not call."""
        if run.resolved_tasks[0].get_dialogue().tools != (TOOL,):
            raise UnusableInput(f'dialogue.tools: the dialogues call only ["{TOOL}"]')

    def prepare(self, run: RunConfig, folder: RunFolder) -> None:
        folder.data.mkdir(parents=True, exist_ok=True)
        for name in SETS:
            random = Random(TEST_SEED)
            questions = draw_distinct(random, stream_templates(random, name), "test", self.num_test_questions)
            _write_jsonl(folder.data / f"test_{name}.jsonl", map(build_row, questions))
        random = Random(run.seed)
        streams = (stream_templates(random, name) for name in ("cold_start", "rl_only"))
        trained = chain.from_iterable(zip(*streams, strict=True))
        questions = draw_distinct(random, trained, "train", self.num_train_questions)
        _write_jsonl(folder.data / "train.jsonl", map(build_row, questions))
        dialogue = run.resolved_tasks[0].get_dialogue()
        random = Random(run.seed)
        problems = draw_problems(random, stream_templates(random, "cold_start"), "dialogues")
        dialogues = generate_dialogues(
            random,
            list(islice(problems, self.num_sft_dialogues)),
            build_dialogue_format(dialogue, MATH_PYTHON),
            dialogue.result_characters,
            shares=self.behaviors,
            reasoning=self.reasoning,
        )
        _write_jsonl(folder.data / "sft.jsonl", ({"messages": messages} for messages in dialogues))


def find_part(problem: Problem) -> Part:
    """Return the only files that may contain the problem, whatever its names and words are."""
    drawn = draw_uniform(zlib.crc32(problem.template.text.encode()), *problem.numbers.values())
    return "test" if drawn < 0.2 else "dialogues" if drawn < 0.6 else "train"


def stream_templates(random: Random, name: str) -> Iterator[Template]:
    """Repeat the templates of a set without end. Composed templates follow each one of the cold start."""
    composed = compose_templates(random)
    for template in cycle(SETS[name]):
        yield template
        if name == "cold_start":
            yield from islice(composed, _COMPOSED)


def draw_problems(random: Random, templates: Iterable[Template], part: Part) -> Iterator[Problem]:
    """Draw a problem of each template, except for templates with so few numbers that none is found for this part."""
    for template in templates:
        with suppress(NoSuitableNumbers):
            drawn = (draw_problem(random, template) for _ in range(_MOST_DRAWS))
            if problem := next((each for each in drawn if find_part(each) == part), None):
                yield problem


def draw_distinct(random: Random, templates: Iterable[Template], part: Part, count: int) -> list[Problem]:
    """Draw problems that differ in more than names and words. Raises UnusableInput if fewer exist."""
    chosen: dict[tuple[str, ...], Problem] = {}
    for problem in islice(draw_problems(random, templates, part), 20 * count):
        chosen.setdefault((problem.template.text, *map(str, problem.numbers.values())), problem)
        if len(chosen) == count:
            return list(chosen.values())
    key = f"prepare.parameters.num_{part}_questions"
    raise UnusableInput(f"{key} = {count}: only about {len(chosen)} distinct questions exist")


def build_row(problem: Problem) -> dict[str, Any]:
    template = problem.template
    operations = len(write_derivation(template.answer, problem.numbers))
    return {
        "question": problem.question,
        "answer": str(problem.answer),
        "family": template.family,
        "difficulty": operations,
    }


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with replacing_file(path) as file:
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
