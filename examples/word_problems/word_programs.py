"""Writes short programs for word problems: right ones, wrong ones, and ones that fail; and runs them like the tool."""

import ast
import contextlib
import copy
import io
import re
from collections.abc import Callable, Iterator, Mapping
from random import Random
from types import ModuleType

from problem_templates import Numbers, Problem, evaluate, list_names

from asterism.bus.messages import CodeOk, CodeOutcome, CodeRaised, Output
from asterism.sandbox.inside.call.run_code import run_cell

_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}
_STEP_NAMES: dict[type[ast.operator], str] = {
    ast.Add: "total",
    ast.Sub: "rest",
    ast.Mult: "product",
    ast.FloorDiv: "share",
}
_MISTAKES: dict[type[ast.operator], tuple[ast.operator, ...]] = {
    ast.Add: (ast.Sub(), ast.Mult()),
    ast.Sub: (ast.Add(),),
    ast.Mult: (ast.Add(),),
    ast.FloorDiv: (ast.Mult(), ast.Sub()),
}
_RESULT_NAMES = ("result", "answer", "total")


class Notebook:
    """The state of one dialogue's calls. The cells are trusted, so they run without a sandbox."""

    def __init__(self) -> None:
        self._main = ModuleType("__main__")

    def run(self, code: str) -> CodeOutcome:
        """Run a cell with the sandbox's own function, so that the outcome equals that of a rollout."""
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            kind, *reason = run_cell(code, self._main)
        output = Output(stdout.getvalue())
        return CodeOk(output) if kind == "ok" else CodeRaised(output, *reason)


def list_wrong_expressions(problem: Problem) -> list[str]:
    """List expressions with one mistake: a wrong operation, an ignored quantity, or a distractor instead of a number.

    The value of each is a positive integer that differs from the answer.
    """
    tree = ast.parse(problem.template.answer, mode="eval").body
    wrong = dict.fromkeys(
        ast.unparse(each) for each in _make_mistakes(tree, problem.template.distractors, at_root=True)
    )
    return [each for each in wrong if _evaluate_exactly(each, problem.numbers) not in (None, problem.answer)]


def _make_mistakes(node: ast.expr, distractors: tuple[str, ...], *, at_root: bool = False) -> Iterator[ast.expr]:
    if isinstance(node, ast.Name):
        yield from (ast.Name(distractor) for distractor in distractors)
    if not isinstance(node, ast.BinOp):
        return
    for operation in _MISTAKES[type(node.op)]:
        yield ast.BinOp(node.left, operation, node.right)
    for side in (node.left, node.right):
        if not at_root or isinstance(side, ast.BinOp):  # a program computes at least one operation
            yield side
    for side in ("left", "right"):
        for mistake in _make_mistakes(getattr(node, side), distractors):
            changed = copy.copy(node)
            setattr(changed, side, mistake)
            yield changed


def _evaluate_exactly(expression: str, numbers: Numbers) -> int | None:
    """Return the value if it is a positive integer without rounding, else None."""
    try:
        value = evaluate(expression.replace("//", "/"), numbers)
    except ZeroDivisionError:
        return None
    return int(value) if value > 0 and value == int(value) else None


def write_program(random: Random, expression: str, numbers: Numbers) -> str:
    """Write a program that shows the value of the expression, in one of several styles."""
    if random.random() < 0.3:
        expression = expression.replace("//", "/")  # the result then ends in ".0"
    write: Callable[[Random, str, Numbers], str] = random.choices(
        (_write_named_steps, _write_variables, _write_result, _write_steps, _write_expression),
        weights=(10, 5, 5, 70, 10),
    )[0]
    return write(random, expression, numbers)


def _assign(expression: str, numbers: Numbers) -> list[str]:
    needed = list_names(expression)
    return [f"{name} = {value}" for name, value in numbers.items() if name in needed]


def _write_variables(random: Random, expression: str, numbers: Numbers) -> str:
    lines = _assign(expression, numbers)
    if random.random() < 0.3:
        names, values = zip(*(line.split(" = ") for line in lines), strict=True)
        lines = [f"{', '.join(names)} = {', '.join(values)}"]
    return "\n".join([*lines, _show(random, expression)])


def _write_result(random: Random, expression: str, numbers: Numbers) -> str:
    name = _choose_result_name(random, numbers)
    return "\n".join([*_assign(expression, numbers), f"{name} = {expression}", _show(random, name)])


def _write_named_steps(random: Random, expression: str, numbers: Numbers) -> str:
    """Write one line per number and one line per operation."""
    lines, shown = _list_steps(expression, {name: name for name in numbers})
    return "\n".join([*_assign(expression, numbers), *lines, _show(random, shown)])


def _write_steps(random: Random, expression: str, numbers: Numbers) -> str:
    """Write one line per operation."""
    lines, shown = _list_steps(expression, numbers)
    return "\n".join([*lines, _show(random, shown)])


def _list_steps(expression: str, values: Mapping[str, object]) -> tuple[list[str], str]:
    """List one assignment per operation, and the name of the result."""
    lines = list[str]()
    names = dict[str, int]()

    def add_step(node: ast.expr) -> str:
        if not isinstance(node, ast.BinOp):
            return _fill(ast.unparse(node), values)
        left, right = add_step(node.left), add_step(node.right)
        symbol = "/" if isinstance(node.op, ast.Div) else _SYMBOLS[type(node.op)]
        name = _STEP_NAMES.get(type(node.op), "share")
        names[name] = names.get(name, int(name in values)) + 1  # a number may have this name
        name += str(names[name]) if names[name] > 1 else ""
        lines.append(f"{name} = {left} {symbol} {right}")
        return name

    shown = add_step(ast.parse(expression, mode="eval").body)
    return lines, shown


def _write_expression(random: Random, expression: str, numbers: Numbers) -> str:
    return _show(random, _fill(expression, numbers))


def _fill(expression: str, values: Mapping[str, object]) -> str:
    return re.sub(r"[a-z]+", lambda match: str(values[match[0]]), expression)


def _show(random: Random, text: str) -> str:
    """Print a value, or make it the cell's last expression, which the tool shows."""
    return text if random.random() < 0.25 else f"print({text})"


def _choose_result_name(random: Random, numbers: Numbers) -> str:
    return random.choice([name for name in _RESULT_NAMES if name not in numbers])


def write_repair(random: Random, expression: str, numbers: Numbers) -> tuple[str, str]:
    """Write a program that raises NameError or SyntaxError, and the next call's program, which shows the value."""
    lines, shown = _list_steps(expression, numbers)
    right = "\n".join([*lines, f"print({shown})"])
    if random.random() < 0.5:
        return right.removesuffix(")"), right
    wrong = random.choice((f"Print({shown})", f"print({shown}s)", f"print({shown.capitalize()})"))
    return "\n".join([*lines, wrong]), f"print({shown})"  # the notebook keeps the variables


def write_silent_repair(expression: str, numbers: Numbers) -> tuple[str, str]:
    """Write a program that shows nothing, and the program for the next call, which shows the value."""
    lines, shown = _list_steps(expression, numbers)
    return "\n".join(lines), f"print({shown})"


def write_hopeless_program(random: Random, expression: str, numbers: Numbers) -> str:
    """Write a program that calls a function that does not exist. Its error differs from those of failing programs."""
    values = ", ".join(line.partition(" = ")[2] for line in _assign(expression, numbers))
    return random.choice(("solve({})", "print(solve({}))", "import solver\nprint(solver.solve({}))")).format(values)


def write_derivation(expression: str, numbers: Numbers) -> list[str]:
    """Return the calculation on paper, one step per operation: "12 * 5 = 60"."""
    steps = list[str]()

    def add_step(node: ast.expr) -> str:
        if isinstance(node, ast.BinOp):
            left, right = add_step(node.left), add_step(node.right)
            symbol = _SYMBOLS[type(node.op)]
            value = str(evaluate(f"{left} {symbol} {right}", {}))
            steps.append(f"{left} {symbol[0]} {right} = {value}")
            return value
        return _fill(ast.unparse(node), numbers)

    add_step(ast.parse(expression, mode="eval").body)
    return steps
