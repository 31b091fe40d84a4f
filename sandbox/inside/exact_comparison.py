"""Compares constants exactly inside math-verify, which rounds them to 15 or 6 decimals.

Two rational numbers must be equal. Other constants must agree in 50 significant digits. A decimal with enough digits
also equals a number that rounds to it.
"""

import importlib
from collections.abc import Callable
from typing import Any

_DIGITS = 50  # common significant digits of equal constants
_GUARD_DIGITS = 10
_MIN_DECIMALS, _MIN_IRRATIONAL_DECIMALS = 4, 6  # decimals of a rounded fraction, and of a rounded irrational


def install() -> None:
    """Replace math-verify's comparison of numbers in this process, also for numbers in sets, tuples and matrices."""
    grader: Any = importlib.import_module("math_verify.grader")
    grader.sympy_numeric_eq = make_comparison(grader.sympy_numeric_eq)


def make_comparison(compare_matrices: Callable[[Any, Any, int, int], bool]) -> Callable[[Any, Any, int, int], bool]:
    """Return a replacement for math-verify's comparison, with the same arguments; matrices go to `compare_matrices`."""
    sympy: Any = importlib.import_module("sympy")

    def compare(one: Any, other: Any, float_rounding: int, numeric_precision: int) -> bool:
        if isinstance(one, sympy.MatrixBase | sympy.MatrixExpr) or isinstance(
            other, sympy.MatrixBase | sympy.MatrixExpr
        ):
            return compare_matrices(one, other, float_rounding, numeric_precision)
        return are_equal_constants(sympy, one, other)

    return compare


def are_equal_constants(sympy: Any, one: Any, other: Any) -> bool:
    """Return whether two constants are equal. False for expressions with letters, which math-verify then simplifies."""
    is_decimal, is_other_decimal = one.is_Float, other.is_Float
    one, other = _make_exact(sympy, one), _make_exact(sympy, other)
    if one.free_symbols or other.free_symbols:
        return bool(one == other)
    if one.is_Rational and other.is_Rational and one == other:
        return True
    if (is_decimal and _rounds(sympy, one, other)) or (is_other_decimal and _rounds(sympy, other, one)):
        return True
    if one.is_Rational and other.is_Rational:
        return False
    return _agree(one, other)


def _make_exact(sympy: Any, value: Any) -> Any:
    """Return the evaluated expression with decimals as fractions."""
    value = value.doit()
    floats = value.atoms(sympy.Float)
    return value.xreplace({each: sympy.Rational(str(each)) for each in floats}) if floats else value


def _agree(one: Any, other: Any) -> bool:
    first, second = one.evalf(_DIGITS + _GUARD_DIGITS), other.evalf(_DIGITS + _GUARD_DIGITS)
    if not (first.is_number and second.is_number):
        return False
    if not (first.is_finite and second.is_finite):
        return bool(first == second)
    return bool(abs(first - second) <= abs(first) * 10**-_DIGITS)


def _rounds(sympy: Any, decimal: Any, exact: Any) -> bool:
    """Return whether a decimal with enough digits is the rounded value of a number that has no finite decimal."""
    num_decimals = _count_decimals(int(decimal.q))
    if exact.is_Rational and pow(10, exact.q.bit_length(), int(exact.q)) == 0:
        return False
    minimum = _MIN_DECIMALS if exact.is_Rational else _MIN_IRRATIONAL_DECIMALS
    if num_decimals < minimum or abs(decimal) * 10**num_decimals < 10 ** (minimum - 1):
        return False
    difference = abs(exact - decimal).evalf(_DIGITS)
    return bool(difference.is_number and difference <= sympy.Rational(1, 2 * 10**num_decimals))


def _count_decimals(denominator: int) -> int:
    num_decimals = 0
    while pow(10, num_decimals, denominator):
        num_decimals += 1
    return num_decimals
