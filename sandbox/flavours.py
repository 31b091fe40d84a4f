"""Which fork server a code needs: the scientific one holds numpy and sympy, and forks at five times the cost."""

from __future__ import annotations

import ast
from typing import Literal

Flavour = Literal["bare", "scientific"]
_SCIENTIFIC = frozenset({"numpy", "sympy", "scipy", "mpmath"})
_PARSED_CHARACTERS = 8_192  # 0.1 s at worst on the event loop; the words of a longer code decide


def flavour_of(code: str) -> Flavour:
    """By the imports that the syntax tree names. Code that does not parse goes to the bare server, which says why."""
    if not any(name in code for name in _SCIENTIFIC):
        return "bare"
    if len(code) > _PARSED_CHARACTERS:
        return "scientific"
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "bare"
    return "scientific" if any(_imports(node) & _SCIENTIFIC for node in ast.walk(tree)) else "bare"


def _imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()
