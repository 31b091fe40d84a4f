"""Generates dialogues that teach the formats of calls and answers; by default, most answers are wrong."""

import ast
import contextlib
import io
import json
from random import Random
from typing import Any

from msgspec.structs import asdict

from asterism.bus.messages import CodeOk, CodeOutcome, CodeRaised, Output
from asterism.configs.schema.dialogue import DialogueConfig, ToolName
from asterism.configs.schema.schema_tree import NonNegativeFloat, Section, require
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.parse_turn import MalformedCall, parse_assistant_turn
from asterism.policies.dialogue.tool_results import format_malformed_call, format_result
from asterism.tasks.math_python import MATH_PYTHON
from asterism.tasks.tiny.derivations import write_derivation
from asterism.tasks.tiny.questions import FAMILIES, Question, draw_question

Message = dict[str, Any]
Messages = list[Message]

_JSON_CORRUPTIONS = (('"}}', '"}'), ('"}}', "}}"))
TOOL: ToolName = "jupyter_code"
FORMAT = build_dialogue_format(DialogueConfig(tools=(TOOL,)), MATH_PYTHON)
TRACEBACK_HEAD = 'Traceback (most recent call last):\n  File "<cell>", line 1, in <module>\n'

COMPUTE = "Let me compute this.</reason>\n"
REPAIR = "The call failed. Let me fix it.</reason>\n"
GIVE_UP = "The call failed. I guess.</reason>\n"
CONCLUDE = "I have the result.</reason>\n"
GUESS = "I know this.</reason>\n"


class BehaviorShares(Section, frozen=True):
    """Relative frequencies of the behaviors in the cold start's dialogues; their sum can be any number.

    With the defaults, wrong dialogues outnumber right ones, so that RL can improve the model. Plain GRPO rewards a
    repaired call as much as a clean call. To show this, "repaired" is more frequent than "clean", and the failing code
    of "gives_up" differs from that of "repaired": with the same code, GRPO would learn to avoid both.
    docs/experiments.md compares runs with other shares.
    """

    clean: NonNegativeFloat = 0.10  # one call, and the right answer
    repaired: NonNegativeFloat = 0.23  # the first call fails, the second call is right
    malformed: NonNegativeFloat = 0.02  # the first call is invalid JSON, the second call is right
    wrong: NonNegativeFloat = 0.37  # the code runs and prints a wrong answer
    gives_up: NonNegativeFloat = 0.13  # a call fails with code that is never repaired; the answer is a guess
    guess: NonNegativeFloat = 0.15  # a wrong answer without a call
    unrepaired: NonNegativeFloat = 0.0  # a call fails as in "repaired"; the answer is a guess
    reasoned: NonNegativeFloat = 0.0  # no call; derives the right answer step by step

    def __post_init__(self) -> None:
        require(any(asdict(self).values()), "at least one share must be above 0")


DEFAULT_SHARES = BehaviorShares()


def generate_dialogues(
    seed: int, count: int, result_characters: int, shares: BehaviorShares = DEFAULT_SHARES
) -> list[Messages]:
    """Generate `count` dialogues on training questions. A dialogue is a list of `{"role", "content"}` messages."""
    random = Random(seed)
    weights: dict[str, float] = asdict(shares)
    behaviors = random.choices(list(weights), weights=list(weights.values()), k=count)
    names = list(FAMILIES)
    drawn = (draw_question(random, seed, held_out=False, family=names[n % len(names)]) for n in range(count))
    return [
        _generate_dialogue(random, behavior, question, result_characters)
        for behavior, question in zip(behaviors, drawn, strict=True)
    ]


def run_snippet(code: str) -> CodeOutcome:
    """Run a trusted snippet that ends in an expression. There is no sandbox."""
    stdout, names = io.StringIO(), dict[str, Any]()
    tree = ast.parse(code)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    try:
        with contextlib.redirect_stdout(stdout):
            exec(compile(tree, "<cell>", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return CodeRaised(Output(stdout.getvalue()), reason, TRACEBACK_HEAD + reason)
    return CodeOk(Output(stdout.getvalue() + ("" if value is None else f"{value!r}\n")))


def _generate_dialogue(random: Random, behavior: str, question: Question, limit: int) -> Messages:
    family = FAMILIES[question.family]
    right = question.fill_snippet(random.choice(family.correct_snippets))
    failing = question.fill_snippet(family.failing_snippet)
    guess = str(max(0, question.answer + random.choice((-3, -2, -1, 1, 2, 3))))
    truth = str(question.answer)
    match behavior:
        case "clean":
            turns = [*_build_call(COMPUTE, right, limit), _build_answer(CONCLUDE, truth)]
        case "repaired":
            turns = [
                *_build_call(COMPUTE, failing, limit),
                *_build_call(REPAIR, right, limit),
                _build_answer(CONCLUDE, truth),
            ]
        case "wrong":
            code, result = _find_wrong_code(random, question)
            turns = [*_build_call(COMPUTE, code, limit), _build_answer(CONCLUDE, result)]
        case "gives_up":
            unfixable = question.fill_snippet(family.unfixable_snippet)
            turns = [*_build_call(COMPUTE, unfixable, limit), _build_answer(GIVE_UP, guess)]
        case "unrepaired":
            turns = [*_build_call(COMPUTE, failing, limit), _build_answer(GIVE_UP, guess)]
        case "reasoned":
            turns = [_build_answer(f"{write_derivation(question)}</reason>\n", truth)]
        case "malformed":
            turns = [
                *_build_malformed_call(random, right, limit),
                *_build_call(REPAIR, right, limit),
                _build_answer(CONCLUDE, truth),
            ]
        case _:
            turns = [_build_answer(GUESS, guess)]
    return [{"role": "user", "content": question.text}, *turns]


def _build_call(reason: str, code: str, limit: int) -> Messages:
    function = {"name": TOOL, "arguments": json.dumps({"code": code})}
    return [
        {
            "role": "assistant",
            "content": FORMAT.prefill + reason,
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": format_result(run_snippet(code), limit)},
    ]


def _build_malformed_call(random: Random, code: str, limit: int) -> Messages:
    """Build a call with corrupted JSON, and the parser's error message."""
    right = FORMAT.calls.format_call(TOOL, {"code": code})
    broken = right.replace(*random.choice(_JSON_CORRUPTIONS))
    (call,) = parse_assistant_turn(broken, FORMAT).calls
    assert isinstance(call, MalformedCall)
    return [
        {"role": "assistant", "content": FORMAT.prefill + COMPUTE + broken},
        {"role": "tool", "content": format_malformed_call(call, limit)},
    ]


def _find_wrong_code(random: Random, question: Question) -> tuple[str, str]:
    """Return code that prints a wrong answer, and the output of this code."""
    family = FAMILIES[question.family]
    for template in random.sample(family.wrong_snippets, len(family.wrong_snippets)):
        code = question.fill_snippet(template)
        outcome = run_snippet(code)
        assert isinstance(outcome, CodeOk)
        result = outcome.output.stdout.strip()
        if result != str(question.answer):
            return code, result
    raise ValueError(f"every wrong snippet gives the right answer: {question.text}")


def _build_answer(reason: str, answer: str) -> Message:
    return {"role": "assistant", "content": f"{FORMAT.prefill}{reason}<answer>\\boxed{{{answer}}}</answer>"}
