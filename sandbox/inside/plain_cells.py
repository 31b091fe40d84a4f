"""Cells that may be run again instead of being kept: cheap to recognize, without effects, always with the same result.

A cell is plain if it computes with numbers, texts and flat containers of them, by operators, loops and a few builtins:
no attributes, imports, definitions or foreign objects, whose methods could do anything. Judged by its compiled code and
by the values that its names have now, in a few microseconds; when in doubt, a cell is not plain. Standard library only.
"""

import builtins
import sys
from opcode import opmap
from types import CodeType, NoneType
from typing import Any

CHARACTERS = 512  # a longer cell is not looked at

_OPERATIONS = (
    "CACHE RESUME NOP POP_TOP PUSH_NULL PRECALL CALL KW_NAMES CALL_KW COPY SWAP EXTENDED_ARG RETURN_VALUE RETURN_CONST "
    "LOAD_CONST LOAD_SMALL_INT LOAD_NAME STORE_NAME BINARY_OP BINARY_SUBSCR BINARY_SLICE STORE_SUBSCR STORE_SLICE "
    "BUILD_SLICE UNARY_POSITIVE UNARY_NEGATIVE UNARY_NOT UNARY_INVERT TO_BOOL COMPARE_OP CONTAINS_OP IS_OP "
    "BUILD_TUPLE BUILD_LIST BUILD_SET BUILD_MAP BUILD_CONST_KEY_MAP BUILD_STRING LIST_EXTEND SET_UPDATE DICT_UPDATE "
    "UNPACK_SEQUENCE FORMAT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC CONVERT_VALUE GET_ITER FOR_ITER END_FOR POP_ITER "
    "NOT_TAKEN JUMP_FORWARD JUMP_BACKWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP POP_JUMP_FORWARD_IF_FALSE "
    "POP_JUMP_FORWARD_IF_TRUE POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE"
)
_PLAIN_OPERATIONS = frozenset(opmap[name] for name in _OPERATIONS.split() if name in opmap)
_FUNCTIONS = (
    "abs all any bin bool chr complex dict divmod float hex int isinstance len list max min oct ord pow print range "
    "repr round set sorted str sum tuple"
)
_PLAIN_FUNCTIONS = {name: getattr(builtins, name) for name in _FUNCTIONS.split()}
_SCALARS = frozenset({int, float, complex, bool, str, bytes, NoneType, range})
_CONTAINERS = frozenset({list, tuple, set, dict})
_ELEMENTS = 256  # of a container that is looked through
_missing = object()
_stdout = sys.stdout


def is_plain(codes: tuple[CodeType | None, CodeType | None], names: dict[str, Any]) -> bool:
    """Whether `codes`, run with the global `names`, are plain now."""
    if sys.gettrace() is not None or sys.__stdout__ is not _stdout or names.get("__builtins__") is not builtins:
        return False
    for code in codes:
        if code is None:
            continue
        if not _PLAIN_OPERATIONS.issuperset(code.co_code[::2]):
            return False
        for name in code.co_names:
            value = names.get(name, _missing)
            if not (_is_plain_function(name) if value is _missing else _is_plain_value(value)):
                return False
    return True


def _is_plain_function(name: str) -> bool:
    """Or a name that nobody has defined, which raises, or is defined by the cell itself."""
    return getattr(builtins, name, _missing) is _PLAIN_FUNCTIONS.get(name, _missing)


def _is_plain_value(value: object) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind not in _CONTAINERS or len(value) > _ELEMENTS:  # pyright: ignore[reportArgumentType]
        return False
    if kind is dict and not _SCALARS.issuperset(map(type, value.values())):  # pyright: ignore
        return False
    return _SCALARS.issuperset(map(type, value))  # pyright: ignore[reportArgumentType]
