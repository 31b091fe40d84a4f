"""Which fork server a code needs: one that holds numpy forks at twice the cost of a bare one, with sympy at four times."""

from __future__ import annotations

import ast
from typing import Literal

Flavour = Literal["bare", "numpy", "scientific"]
_HELD_BY: dict[str, Flavour] = {"numpy": "numpy", "scipy": "numpy", "sympy": "scientific", "mpmath": "scientific"}
_ORDER: tuple[Flavour, ...] = ("bare", "numpy", "scientific")  # each holds what those before it hold
_PARSED_CHARACTERS = 8_192  # 0.1 s at worst on the event loop; the words of a longer code decide


def flavour_of(code: str) -> Flavour:
    """By the imports that the syntax tree names. Code that does not parse goes to the bare server, which says why."""
    words = {name for name in _HELD_BY if name in code}
    if not words or len(code) > _PARSED_CHARACTERS:
        return _that_holds(words)
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "bare"
    return _that_holds({name for node in ast.walk(tree) for name in _imports(node)})


def _that_holds(modules: set[str]) -> Flavour:
    holders: list[Flavour] = ["bare", *(_HELD_BY[name] for name in modules & _HELD_BY.keys())]
    return max(holders, key=_ORDER.index)


def _imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()
