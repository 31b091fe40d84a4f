"""Recognizes pure cells: deterministic and without effects, so that a replay restores their result.

A cell is pure if it computes with numbers, strings and flat containers of them, by operators,
loops and a few builtins. Attributes, imports, definitions and other objects make a cell impure,
because their code could have any effect. The check uses the compiled code and the current values
of its names, takes a few microseconds, and rejects cells in doubt.
"""

import builtins
import sys
from io import TextIOWrapper
from opcode import opmap
from types import CodeType, NoneType
from typing import Any

MAX_CHARACTERS = 512  # a longer cell counts as impure

_OPERATIONS = (
    "CACHE RESUME NOP POP_TOP PUSH_NULL PRECALL CALL KW_NAMES CALL_KW COPY SWAP EXTENDED_ARG RETURN_VALUE RETURN_CONST "
    "LOAD_CONST LOAD_SMALL_INT LOAD_NAME STORE_NAME BINARY_OP BINARY_SUBSCR BINARY_SLICE STORE_SUBSCR STORE_SLICE "
    "BUILD_SLICE UNARY_POSITIVE UNARY_NEGATIVE UNARY_NOT UNARY_INVERT TO_BOOL COMPARE_OP CONTAINS_OP IS_OP "
    "BUILD_TUPLE BUILD_LIST BUILD_SET BUILD_MAP BUILD_CONST_KEY_MAP BUILD_STRING LIST_EXTEND SET_UPDATE DICT_UPDATE "
    "UNPACK_SEQUENCE FORMAT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC CONVERT_VALUE GET_ITER FOR_ITER END_FOR POP_ITER "
    "NOT_TAKEN JUMP_FORWARD JUMP_BACKWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP POP_JUMP_FORWARD_IF_FALSE "
    "POP_JUMP_FORWARD_IF_TRUE POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE"
)
_PURE_OPERATIONS = frozenset(opmap[name] for name in _OPERATIONS.split() if name in opmap)
_FUNCTIONS = (
    "abs all any bin bool chr complex dict divmod float hex int isinstance len list max min oct ord pow print range "
    "repr round set sorted str sum tuple"
)
_PURE_FUNCTIONS = {name: getattr(builtins, name) for name in _FUNCTIONS.split()}
_SCALARS = frozenset({int, float, complex, bool, str, bytes, NoneType, range})
_CONTAINERS = frozenset({list, tuple, set, dict})
_MAX_ELEMENTS = 256  # a larger container makes a cell impure
_missing = object()


def is_pure(codes: tuple[CodeType | None, CodeType | None], names: dict[str, Any]) -> bool:
    """Return whether `codes` are pure when run with the global `names`."""
    if sys.gettrace() is not None or type(sys.stdout) is not TextIOWrapper or names.get("__builtins__") is not builtins:
        return False
    for code in codes:
        if code is None:
            continue
        if not _PURE_OPERATIONS.issuperset(code.co_code[::2]):
            return False
        for name in code.co_names:
            value = names.get(name, _missing)
            if not (_is_pure_function(name) if value is _missing else _is_pure_value(value)):
                return False
    return True


def _is_pure_function(name: str) -> bool:
    """Return True also for an undefined name: the cell defines it or raises NameError."""
    return getattr(builtins, name, _missing) is _PURE_FUNCTIONS.get(name, _missing)


def _is_pure_value(value: object) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind not in _CONTAINERS or len(value) > _MAX_ELEMENTS:  # pyright: ignore[reportArgumentType]
        return False
    if kind is dict and not _SCALARS.issuperset(map(type, value.values())):  # pyright: ignore
        return False
    return _SCALARS.issuperset(map(type, value))  # pyright: ignore[reportArgumentType]
