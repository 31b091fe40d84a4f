"""Evaluate the left sides of equations for plain_evaluator: a name, or arithmetic with `ast` and `fractions`."""

import ast
from fractions import Fraction

NAMELESS = ("\\left", "\\right", "\\boxed", "\\fbox", "\\phantom")  # commands that no left side of an equation contains


def is_name(side: str) -> bool:
    """Return whether the brackets are balanced and the text outside of brackets could be a name."""
    outside, depth = "", 0
    for character in side:
        closes = character in ")]}"
        depth += (character in "([{") - closes
        if depth < 0:
            return False
        if depth == 0 or (depth == 1 and character in "([{"):
            outside += character
    if depth or side.count("|") % 2 or any(command in side for command in NAMELESS):
        return False
    if not all(character.isalnum() or character in "\\{}()[]|_^+-*/.'! " for character in outside):
        return False
    if outside[-1] not in ")]}|'" and not outside[-1].isalnum() and not outside.endswith("^*"):
        return False
    return outside[0] in "\\({[|+-_" or outside[0].isalnum()


def calculate(text: str) -> Fraction | None:
    """Return the value of arithmetic with + - * / ^ and brackets."""
    if not text or any(character not in "0123456789.+-*/^() " for character in text):
        return None
    compact = text.replace(" ", "")
    if any(not after[:1].isdigit() for after in compact.split(".")[1:]):
        return None
    for place, character in enumerate(compact):
        before = compact[place - 1] if place else "("
        if character in "+-*/^" and before in "+-*/^(" and character + before not in ("+(", "-(", "-^"):
            return None
    try:
        return _walk(ast.parse(_strip_zeros(text).strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError):
        return None


def _strip_zeros(text: str) -> str:
    kept = ""
    for place, character in enumerate(text):
        is_leading = character == "0" and not (kept and (kept[-1].isdigit() or kept[-1] == "."))
        if not (is_leading and text[place + 1 : place + 2].isdigit()):
            kept += character
    return kept


def _walk(node: ast.expr) -> Fraction | None:
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(str(node.value))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            value = _walk(node.operand)
            return None if value is None else (-value if isinstance(node.op, ast.USub) else value)
        case ast.BinOp():
            left, right = _walk(node.left), _walk(node.right)
            if left is None or right is None:
                return None
            return _apply(node.op, left, right)
        case _:
            return None


def _apply(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction | None:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right if right else None
        case ast.Pow() if right.denominator == 1 and abs(right) < 500 and (left or right > 0):
            return left ** int(right)
        case _:
            return None
