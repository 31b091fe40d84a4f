"""Sinks deliver these records: a line of metrics.jsonl with stable names and the axis of its step.

The names are an interface (docs/metrics.md): dashboards of users refer to them.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Axis = Literal["rl", "cold_start"]
# Every backend accepts the other characters in a name; MLflow refuses most of these.
_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
_PREFIXES = {"step": "rl", "sft": "cold_start"}


class MetricRecord(msgspec.Struct, frozen=True):
    number: int  # position in the order of delivery, from 0; never reused in a run
    axis: Axis  # RL steps or optimizer steps of the cold start
    step: int  # step on the axis
    values: Mapping[str, float]  # values by name
    texts: Mapping[str, str]  # texts by name


def get_axis(kind: str) -> Axis:
    return "cold_start" if kind == "sft" else "rl"


def build_record(number: int, line: bytes) -> MetricRecord:
    """Build the record without null values, which were not measured. A health report counts as the value 1."""
    fields: dict[str, Any] = msgspec.json.decode(line)
    kind, step = fields.pop("kind"), fields.pop("step")
    values, texts = dict[str, float](), dict[str, str]()
    match kind:
        case "health":
            name = f"health/{clean_name(fields['check'])}"
            values[name], texts[f"{name}_message"] = 1.0, f"{fields['action']}: {fields['message']}"
        case _:
            label = fields.pop("label", "")
            prefix = f"{_PREFIXES.get(kind, clean_name(kind))}/{f'{clean_name(label)}/' if label else ''}"
            for key, value in fields.items():
                if isinstance(value, int | float):
                    values[prefix + clean_name(key)] = float(value)
                elif value is not None:
                    texts[prefix + clean_name(key)] = str(value)
    return MetricRecord(number, get_axis(kind), step, values, texts)


def clean_name(key: str) -> str:
    """Change `reward: format` to `reward-format`; characters except letters, digits, "_", "." and "-" become "_", and
    characters outside ASCII become code points, such as `_u683c`, so that names remain different."""
    ascii_key = key.encode("ascii", "backslashreplace").decode()
    return _OTHER_CHARACTERS.sub("_", ascii_key.replace(": ", "-"))
