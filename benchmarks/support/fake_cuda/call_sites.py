"""Finds the function of the project that an operation of torch belongs to."""

# pyright: reportPrivateUsage=false
# Reason: torch has no public names for these functions.

import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import asterism

_PACKAGE = str(Path(str(asterism.__file__)).parent)
_BACKWARD = str(Path("torch", "autograd", "graph.py"))  # the frame that calls autograd's engine


class CallSite(NamedTuple):
    """The innermost function of the project on the stack. Both names are empty if there is none."""

    module: str = ""
    function: str = ""  # qualified name
    line: int = 0

    @property
    def place(self) -> str:
        return f"{self.module}:{self.function}"


class SiteFinder:
    """Finds call sites. The site of a backward operation is the function that called the forward operation."""

    def __init__(self) -> None:
        self._by_node: dict[int, CallSite] = {}  # keys: sequence numbers of the forward operations' nodes

    def find(self) -> CallSite:
        site, is_backward = _walk_stack()
        if is_backward:
            node: Any = torch._C._current_autograd_node()
            return site if node is None else self._by_node.get(node._sequence_nr(), site)
        last_node = torch._C._autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]
        self._by_node.setdefault(last_node, site)  # the first operation after a node's creation belongs to the node
        return site


def _walk_stack() -> tuple[CallSite, bool]:
    """Return the site, and whether the stack contains autograd's engine."""
    frame, is_backward = sys._getframe(2), False
    while frame is not None:
        filename = frame.f_code.co_filename
        if module := _name_module(filename):
            return CallSite(module, frame.f_code.co_qualname, frame.f_lineno), is_backward
        is_backward = is_backward or filename.endswith(_BACKWARD)
        frame = frame.f_back
    return CallSite(), is_backward


@cache
def _name_module(filename: str) -> str:
    path = Path(filename)
    if not path.is_relative_to(_PACKAGE):
        return ""
    return ".".join(("asterism", *path.relative_to(_PACKAGE).with_suffix("").parts))
