"""The program for [prepare] that writes word problems and dialogues below the run's folder (docs/word_problems.md).

data/train.jsonl                        questions of the sets cold_start and rl_only, in equal numbers
data/sft.jsonl                          dialogues on questions of the set cold_start
data/test_{cold_start,rl_only,test_only}.jsonl   questions of each set, which are the same for every seed

No two of these files share the numbers of a template.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import templates_cold_start
import templates_cold_start_home
import templates_cold_start_money
import templates_cold_start_outside
import templates_composed
import templates_rl
import templates_test
from problem_templates import Problem, Template, draw_problem
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
    *templates_composed.TEMPLATES,
)
SETS = {
    # This order mixes the families, because an evaluation asks only the first questions of a file.
    "cold_start": tuple(sorted(_COLD_START, key=lambda template: zlib.crc32(template.text.encode()))),
    "rl_only": templates_rl.TEMPLATES,
    "test_only": templates_test.TEMPLATES,
}
TEST_SEED = 0


class WordProblems(PrepareProgram, frozen=True):
    """The parameters of the program."""

    num_train_questions: PositiveInt = 1920
    num_test_questions: PositiveInt = 240  # questions of each set
    num_sft_dialogues: PositiveInt = 2880
    behaviors: BehaviorShares = WORD_SHARES  # frequencies of behaviors in the dialogues
    reasoning: bool = False  # add sentences of reasoning to the dialogues

    def check(self, run: RunConfig) -> None:
        """Raise UnusableInput for tools that the dialogues do not call."""
        if run.resolved_tasks[0].get_dialogue().tools != (TOOL,):
            raise UnusableInput(f'dialogue.tools: the dialogues call only ["{TOOL}"]')

    def prepare(self, run: RunConfig, folder: RunFolder) -> None:
        folder.data.mkdir(parents=True, exist_ok=True)
        for name, templates in SETS.items():
            questions = draw_distinct(Random(TEST_SEED), templates, "test", self.num_test_questions)
            _write_jsonl(folder.data / f"test_{name}.jsonl", map(build_row, questions))
        # The smaller set repeats, so that each set has every other question.
        trained = tuple(chain.from_iterable(zip(SETS["cold_start"], cycle(SETS["rl_only"]), strict=False)))
        questions = draw_distinct(Random(run.seed), trained, "train", self.num_train_questions)
        _write_jsonl(folder.data / "train.jsonl", map(build_row, questions))
        dialogue = run.resolved_tasks[0].get_dialogue()
        dialogues = generate_dialogues(
            Random(run.seed),
            list(islice(draw_problems(Random(run.seed), SETS["cold_start"], "dialogues"), self.num_sft_dialogues)),
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


def draw_problems(random: Random, templates: tuple[Template, ...], part: Part) -> Iterator[Problem]:
    """Draw an endless stream of problems that cycles through the templates."""
    for template in cycle(templates):
        while find_part(problem := draw_problem(random, template)) != part:
            pass
        yield problem


def draw_distinct(random: Random, templates: tuple[Template, ...], part: Part, count: int) -> list[Problem]:
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
