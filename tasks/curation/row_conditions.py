"""Conditions over the rollouts of a row, such as `0 < solved < rollouts`: the language of `asterism data filter --keep`.

The parser turns a condition into functions over numbers, with Python's `ast`, and never executes it. It accepts only
comparisons, `and`, `or`, `not`, the four operations, numbers and known names.
"""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

from asterism.configs.errors import UnusableInput

Values = Mapping[str, float]  # by name
_Number = Callable[[Values], float]
_Test = Callable[[Values], bool]

_MAX_CHARACTERS = 500
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class RowCondition(NamedTuple):
    text: str
    test: _Test

    def is_met(self, values: Values) -> bool:
        """Return whether the values meet the condition. Raises UnusableInput for a division by zero."""
        try:
            return self.test(values)
        except ArithmeticError as error:
            numbers = ", ".join(f"{name} = {value:g}" for name, value in values.items() if name in self.text)
            raise UnusableInput(f"--keep {self.text!r}: {error}, with {numbers}") from None


def parse_condition(text: str, names: Collection[str]) -> RowCondition:
    """Parse a condition over `names`. Raises UnusableInput with the part that is not a condition."""
    if len(text) > _MAX_CHARACTERS:
        raise UnusableInput(f"--keep: {len(text):,} characters; at most {_MAX_CHARACTERS} are allowed")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return RowCondition(text, _Parser(text, names).parse_test(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, UnusableInput):
            raise
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "too deeply nested"
        raise UnusableInput(f"--keep {text!r}: {reason}; {_describe_language(names)}") from None


def _describe_language(names: Collection[str]) -> str:
    return f"write a comparison, such as '0 < rate <= 0.5', of {', '.join(names)} and numbers, joined by and, or, not"


class _Parser(NamedTuple):
    text: str
    names: Collection[str]

    def parse_test(self, node: ast.expr) -> _Test:
        match node:
            case ast.BoolOp(op=joint, values=values):
                tests = [self.parse_test(each) for each in values]
                join = all if isinstance(joint, ast.And) else any
                return lambda known: join(test(known) for test in tests)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.parse_test(operand)
                return lambda known: not inner(known)
            case ast.Compare():
                return self._parse_comparison(node)
            case _:
                raise self._build_error(node, "is no comparison")

    def parse_number(self, node: ast.expr) -> _Number:
        match node:
            case ast.Name(id=name) if name in self.names:
                return lambda known: known[name]
            case ast.Name(id=name):
                raise self._build_error(node, "is an unknown name")
            case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
                number = self._read_number(node, value)
                return lambda _known: number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.parse_number(operand)
                return lambda known: -inner(known)
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
                first, second, apply = self.parse_number(left), self.parse_number(right), _OPERATIONS[type(operation)]
                return lambda known: apply(first(known), second(known))
            case _:
                raise self._build_error(node, "is neither a number nor a known name")

    def _parse_comparison(self, node: ast.Compare) -> _Test:
        """Parse a chain, such as `0 < solved < 4`, in which each pair of neighbours must meet its comparison."""
        numbers = [self.parse_number(each) for each in (node.left, *node.comparators)]
        unknown = [each for each in node.ops if type(each) not in _COMPARISONS]
        if unknown:
            raise self._build_error(node, "has a comparison other than <, <=, >, >=, == and !=")
        compare = [_COMPARISONS[type(each)] for each in node.ops]

        def test(known: Values) -> bool:
            values = [number(known) for number in numbers]
            return all(each(*pair) for each, pair in zip(compare, pairwise(values), strict=True))

        return test

    def _read_number(self, node: ast.expr, value: float) -> float:
        try:
            return float(value)
        except OverflowError:
            raise self._build_error(node, "is too large") from None

    def _build_error(self, node: ast.expr, problem: str) -> UnusableInput:
        part = ast.get_source_segment(self.text.strip(), node) or self.text
        return UnusableInput(f"--keep {self.text!r}: {part!r} {problem}; {_describe_language(self.names)}")
