"""Which fork server a code needs: the scientific one holds numpy and sympy, and forks at five times the cost."""

from __future__ import annotations

import ast
import sys
import sysconfig
from pathlib import Path
from typing import Literal

Flavour = Literal["bare", "scientific"]
_SCIENTIFIC = frozenset({"numpy", "sympy", "scipy", "mpmath"})
_PARSED_CHARACTERS = 65_536  # a longer code is not parsed on the event loop: its words decide


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


def import_folders() -> tuple[str, ...]:
    """The standard library's folders and the installed packages', where executed code finds its modules."""
    paths = sysconfig.get_paths()
    zipped = f"{sys.base_prefix}/lib/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    candidates = (paths["stdlib"], f"{paths['platstdlib']}/lib-dynload", _dynload(), paths["purelib"], paths["platlib"])
    found = [str(Path(path)) for path in (zipped, *candidates) if Path(path).exists()]
    return tuple(dict.fromkeys(found))


def _dynload() -> str:
    return next((path for path in sys.path if path.endswith("lib-dynload")), "")
