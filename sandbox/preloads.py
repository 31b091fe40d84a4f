"""Selects the preload of the fork server for a piece of code.

A fork of a numpy server costs twice as much as a fork of a bare server, and a fork of a sympy server four times.
"""

import ast
from typing import Literal

Preload = Literal["bare", "numpy", "scientific"]
_PRELOAD_BY_MODULE: dict[str, Preload] = {
    "numpy": "numpy",
    "scipy": "numpy",
    "sympy": "scientific",
    "mpmath": "scientific",
}
_PRELOADS_BY_SIZE: tuple[Preload, ...] = ("bare", "numpy", "scientific")  # each preload includes the smaller ones
# Parsing takes 0.1 s at worst on the event loop; longer code is only searched for the module names.
_MAX_PARSED_CHARACTERS = 8_192


def select_preload(code: str) -> Preload:
    """Select by the imports in the syntax tree; a bare server reports the errors of code that does not parse."""
    words = {name for name in _PRELOAD_BY_MODULE if name in code}
    if not words or len(code) > _MAX_PARSED_CHARACTERS:
        return _find_smallest_preload(words)
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "bare"
    return _find_smallest_preload({name for node in ast.walk(tree) for name in _list_imports(node)})


def _find_smallest_preload(modules: set[str]) -> Preload:
    holders: list[Preload] = ["bare", *(_PRELOAD_BY_MODULE[name] for name in modules & _PRELOAD_BY_MODULE.keys())]
    return max(holders, key=_PRELOADS_BY_SIZE.index)


def _list_imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()
