"""Generates dialogues for the cold start: short remarks, calls with their true results, and boxed answers."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from msgspec.structs import asdict
from problem_templates import Problem
from word_programs import (
    Notebook,
    list_wrong_expressions,
    write_derivation,
    write_hopeless_program,
    write_program,
    write_repair,
    write_silent_repair,
)

from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.policies.dialogue.parse_turn import MalformedCall, parse_assistant_turn
from asterism.policies.dialogue.tool_results import format_malformed_call, format_result
from asterism.tasks.tiny.cold_start_dialogues import TOOL, BehaviorShares

Messages = list[dict[str, Any]]

# Unlike in the demo, right dialogues outnumber wrong ones: a small model needs them to learn the meaning of a text.
WORD_SHARES = BehaviorShares(clean=0.62, repaired=0.26, malformed=0.02, wrong=0.06, gives_up=0.02, guess=0.02)
SILENT_SHARE = 0.2  # share of the repairs whose first program runs but shows nothing

COMPUTE = (
    "Let me compute this.",
    "I use Python for this.",
    "Python can do this.",
    "Let me run the numbers.",
    "I write a short program.",
    "A small program helps.",
    "Let me calculate.",
    "First I compute.",
    "I set up the numbers.",
    "Let me work it out.",
    "I let Python calculate.",
    "This needs a calculation.",
    "Let me solve it step by step.",
    "I start with the numbers.",
    "Time to calculate.",
    "",
)
REPAIR = (
    "That failed. I fix it.",
    "There is an error. Let me try again.",
    "I made a mistake in the code.",
    "Let me correct the program.",
    "I repair the code.",
    "Once more, without the error.",
)
SHOW = ("Nothing was printed.", "I forgot to print.", "I still have to show the result.")
GIVE_UP = ("That failed. I guess.", "The code does not work, so I estimate.", "Then I guess.")
GUESS = ("I know this.", "That is easy.", "I see it at once.", "")
CONCLUDE = ("", "", "", "Done.", "That is it.", "So the answer is", "The answer is", "I have the result.")
OPENERS = ("First", "Then", "Next", "After that", "Finally")

_JSON_CORRUPTIONS = (('"}}', '"}'), ('"}}', "}}"))


class DialogueWriter:
    """Writes one dialogue, in the format of the run."""

    def __init__(self, random: Random, problem: Problem, dialogue: DialogueFormat, limit: int) -> None:
        self.random, self.problem, self.dialogue = random, problem, dialogue
        self.limit = limit  # characters of a result
        self.notebook = Notebook()
        self.messages: Messages = [{"role": "user", "content": problem.question}]

    def call(self, remarks: Sequence[str], code: str, *, reasoning: str = "") -> str:
        """Add a call and its result. Return the result."""
        function = {"name": TOOL, "arguments": json.dumps({"code": code})}
        call = {"type": "function", "function": function}
        self._say([reasoning, self.random.choice(remarks)], tool_calls=[call])
        result = format_result(self.notebook.run(code), self.limit)
        self.messages.append({"role": "tool", "content": result})
        return result

    def call_malformed(self, code: str, *, reasoning: str = "") -> None:
        """Add a call with corrupted JSON, and the parser's error message."""
        call = self.dialogue.calls.format_call(TOOL, {"code": code})
        broken = call.replace(*self.random.choice(_JSON_CORRUPTIONS))
        (parsed,) = parse_assistant_turn(broken, self.dialogue).calls
        assert isinstance(parsed, MalformedCall)
        self._say([reasoning, self.random.choice(COMPUTE), broken])
        self.messages.append({"role": "tool", "content": format_malformed_call(parsed, self.limit)})

    def answer(self, remarks: Sequence[str], answer: str, *, reasoning: str = "") -> None:
        tags = f"{self.dialogue.answer_open}\\boxed{{{answer}}}{self.dialogue.answer_close}"
        self._say([reasoning, self.random.choice(remarks), tags])

    def _say(self, parts: Sequence[str], **fields: Any) -> None:
        text = self.dialogue.prefill + "\n".join(filter(None, parts))
        if fields and text:
            text += "\n"  # before the call
        self.messages.append({"role": "assistant", "content": text, **fields})


def generate_dialogues(
    random: Random,
    problems: Sequence[Problem],
    dialogue: DialogueFormat,
    limit: int,
    *,
    shares: BehaviorShares = WORD_SHARES,
    reasoning: bool = False,
) -> list[Messages]:
    """Generate a dialogue for each problem. `reasoning` adds sentences and changes nothing else."""
    weights: dict[str, float] = asdict(shares)
    behaviors = random.choices(list(weights), weights=list(weights.values()), k=len(problems))
    return [
        _write_dialogue(DialogueWriter(random, problem, dialogue, limit), behavior, reasoning=reasoning)
        for behavior, problem in zip(behaviors, problems, strict=True)
    ]


def _write_dialogue(writer: DialogueWriter, behavior: str, *, reasoning: bool) -> Messages:
    random, problem = writer.random, writer.problem
    right, numbers, truth = problem.template.answer, problem.numbers, str(problem.answer)
    wrong = random.choice(list_wrong_expressions(problem))
    is_right = behavior in ("clean", "repaired", "malformed", "reasoned")
    steps = write_derivation(right if is_right else wrong, numbers)
    thoughts = write_reasoning(problem, steps) if reasoning else ""
    guess = steps[-1].rpartition(" ")[2]
    match behavior:
        case "clean":
            writer.call(COMPUTE, write_program(random, right, numbers), reasoning=thoughts)
            writer.answer(CONCLUDE, truth)
        case "repaired":
            is_silent = random.random() < SILENT_SHARE
            repair = write_silent_repair(right, numbers) if is_silent else write_repair(random, right, numbers)
            writer.call(COMPUTE, repair[0], reasoning=thoughts)
            writer.call(SHOW if is_silent else REPAIR, repair[1])
            writer.answer(CONCLUDE, truth)
        case "malformed":
            program = write_program(random, right, numbers)
            writer.call_malformed(program, reasoning=thoughts)
            writer.call(REPAIR, program)
            writer.answer(CONCLUDE, truth)
        case "wrong":
            writer.call(COMPUTE, write_program(random, wrong, numbers), reasoning=thoughts)
            writer.answer(CONCLUDE, guess)
        case "gives_up":
            writer.call(COMPUTE, write_hopeless_program(random, wrong, numbers), reasoning=thoughts)
            writer.answer(GIVE_UP, guess)
        case "unrepaired":
            failing, _ = write_repair(random, wrong, numbers)
            writer.call(COMPUTE, failing, reasoning=thoughts)
            writer.answer(GIVE_UP, guess)
        case "reasoned":
            writer.answer([". ".join(steps) + "."], truth, reasoning=thoughts)
        case _:
            writer.answer(GUESS, guess, reasoning=thoughts)
    return writer.messages


def write_reasoning(problem: Problem, steps: Sequence[str]) -> str:
    """Write the derivation in a few sentences, which resemble the reasoning of a larger model."""
    *known, last = (f"{name} = {value}" for name, value in problem.numbers.items())
    given = f"{', '.join(known)} and {last}" if known else last
    openers = [*OPENERS[: len(steps) - 1], OPENERS[-1]] if len(steps) > 1 else ["Therefore"]
    sentences = [f"{opener}, {step}." for opener, step in zip(openers, steps, strict=True)]
    return " ".join([f"Let me think about the problem. We know that {given}.", *sentences])
