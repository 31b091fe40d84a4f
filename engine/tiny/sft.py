"""Dialogues for the cold start: the tool's format and the answer's, but not which way is the right one.

The correct way is outweighed by wrong ones on purpose. A model that starts near its ceiling leaves nothing to learn.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from random import Random
from typing import Any

from bus.messages import CodeOk, CodeOutcome, CodeRaised, Output
from engine.tiny.task import FAMILIES, Question, draw_question
from policies.dialogue import PREFILL, MalformedCall, ToolName, read_turn, tool_call_text
from policies.tool_text import malformed_text, result_text

Message = dict[str, Any]
Messages = list[Message]

# What a dialogue shows, and its share. To plain GRPO a call that fails and is repaired is as good as one that never
# fails. So that it shows, the repaired way is the more frequent one, and code whose failure ends in a guess is other
# code: else plain GRPO would learn to avoid both, for the guess's sake.
MIX = {
    "clean": 0.10,
    "repaired": 0.23,  # the first call fails, the second is right
    "malformed": 0.02,  # the first call is no JSON, the second is right
    "wrong": 0.37,  # the code runs and prints something else
    "gives_up": 0.13,  # the call fails, the answer is a guess
    "guess": 0.15,  # no call at all
}
_SLIPS = (('"}}', '"}'), ('"}}', "}}"))
TOOL: ToolName = "jupyter_code"
TRACEBACK_HEAD = 'Traceback (most recent call last):\n  File "<cell>", line 1, in <module>\n'

COMPUTE = "Let me compute this.</reason>\n"
REPAIR = "The call failed. Let me fix it.</reason>\n"
GIVE_UP = "The call failed. I guess.</reason>\n"
CONCLUDE = "I have the result.</reason>\n"
GUESS = "I know this.</reason>\n"


def dialogues(seed: int, count: int, result_characters: int) -> list[Messages]:
    """`count` dialogues on questions of the training side, each `{"role", "content"}` messages in order."""
    random = Random(seed)
    ways = random.choices(list(MIX), weights=list(MIX.values()), k=count)
    names = list(FAMILIES)
    drawn = (draw_question(random, seed, held_out=False, family=names[n % len(names)]) for n in range(count))
    return [_dialogue(random, way, question, result_characters) for way, question in zip(ways, drawn, strict=True)]


def run_snippet(code: str) -> CodeOutcome:
    """What the sandbox's notebook returns for one line that ends in an expression.

    Only for the snippets of this package, which are as trusted as it is; a model's code runs in the sandbox.
    """
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


def _dialogue(random: Random, way: str, question: Question, limit: int) -> Messages:
    family = FAMILIES[question.family]
    right, failing = question.code(random.choice(family.right)), question.code(family.failing)
    guess = str(max(0, question.answer + random.choice((-3, -2, -1, 1, 2, 3))))
    truth = str(question.answer)
    match way:
        case "clean":
            turns = [*_call(COMPUTE, right, limit), _answer(CONCLUDE, truth)]
        case "repaired":
            turns = [*_call(COMPUTE, failing, limit), *_call(REPAIR, right, limit), _answer(CONCLUDE, truth)]
        case "wrong":
            code, result = _wrong(random, question)
            turns = [*_call(COMPUTE, code, limit), _answer(CONCLUDE, result)]
        case "gives_up":
            turns = [*_call(COMPUTE, question.code(family.hopeless), limit), _answer(GIVE_UP, guess)]
        case "malformed":
            turns = [*_malformed(random, right, limit), *_call(REPAIR, right, limit), _answer(CONCLUDE, truth)]
        case _:
            turns = [_answer(GUESS, guess)]
    return [{"role": "user", "content": question.text}, *turns]


def _call(reason: str, code: str, limit: int) -> Messages:
    function = {"name": TOOL, "arguments": json.dumps({"code": code})}
    return [
        {"role": "assistant", "content": PREFILL + reason, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": result_text(run_snippet(code), limit)},
    ]


def _malformed(random: Random, code: str, limit: int) -> Messages:
    """A call that lost a character or two of its JSON, and the parser's complaint about it."""
    right = tool_call_text(TOOL, {"code": code})
    broken = right.replace(*random.choice(_SLIPS))
    (call,) = read_turn(broken, [TOOL]).calls
    assert isinstance(call, MalformedCall)
    return [
        {"role": "assistant", "content": PREFILL + COMPUTE + broken},
        {"role": "tool", "content": malformed_text(call.error, limit)},
    ]


def _wrong(random: Random, question: Question) -> tuple[str, str]:
    """Code that runs and prints something else than the answer, and what it prints."""
    family = FAMILIES[question.family]
    for template in random.sample(family.wrong, len(family.wrong)):
        code = question.code(template)
        outcome = run_snippet(code)
        assert isinstance(outcome, CodeOk)
        result = outcome.output.stdout.strip()
        if result != str(question.answer):
            return code, result
    raise ValueError(f"every wrong snippet gives the right answer: {question.text}")


def _answer(reason: str, answer: str) -> Message:
    return {"role": "assistant", "content": f"{PREFILL}{reason}<answer>\\boxed{{{answer}}}</answer>"}
