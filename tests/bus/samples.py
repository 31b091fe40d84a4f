"""Random messages of every kind, generated from the types of the fields."""

import math
import random
from collections.abc import Sequence
from typing import get_args

import msgspec
from msgspec import inspect

from asterism.bus.messages import AnyMessage, Envelope

KINDS: tuple[type[AnyMessage], ...] = get_args(AnyMessage)
_TEXTS = ("", "rollout-0", "x" * 40, "Δ∑ 你好", "print(1)\n" * 20)


def sample(kind: type[AnyMessage], draw: random.Random) -> AnyMessage:
    return msgspec.convert(_value(inspect.type_info(kind), draw), kind)


def envelope(kind: type[AnyMessage], draw: random.Random) -> Envelope:
    return Envelope(draw.choice(("head/buffer", "executor-0/2", "a" * 40)), "rollout-0", sample(kind, draw))


def _value(type_: inspect.Type, draw: random.Random) -> object:
    match type_:
        case inspect.StructType():
            head = [type_.tag] if type_.tag is not None else []
            return (
                [*head, *(_value(field.type, draw) for field in type_.fields)]
                if type_.array_like
                else {field.encode_name: _value(field.type, draw) for field in type_.fields}
            )
        case inspect.UnionType():
            return _value(draw.choice(type_.types), draw)
        case inspect.LiteralType():
            return draw.choice(type_.values)
        case inspect.VarTupleType() | inspect.ListType():
            return [_value(type_.item_type, draw) for _ in range(draw.randrange(3))]
        case inspect.DictType():
            return {_value(type_.key_type, draw): _value(type_.value_type, draw) for _ in range(draw.randrange(3))}
        case _:
            return _scalar(type_, draw)


def _scalar(type_: inspect.Type, draw: random.Random) -> object:
    match type_:
        case inspect.IntType():
            return draw.choice(_list_within(type_, (0, -1, 7, 70_000, 2**40, -(2**63), 2**63)))
        case inspect.FloatType():
            return draw.choice(_list_within(type_, (0.0, -1.5, 0.5, 1e300)))
        case inspect.StrType():
            return draw.choice(_TEXTS)
        case inspect.BytesType():
            return draw.randbytes(draw.choice((0, 4, 400)))
        case inspect.BoolType():
            return draw.random() < 0.5
        case inspect.NoneType():
            return None
        case _:
            raise TypeError(f"no sample of {type_}")


def _list_within(type_: inspect.IntType | inspect.FloatType, values: Sequence[float]) -> list[float]:
    low = -math.inf if type_.ge is None else type_.ge
    above = -math.inf if type_.gt is None else type_.gt
    high = math.inf if type_.le is None else type_.le
    return [value for value in values if low <= value <= high and value > above]
