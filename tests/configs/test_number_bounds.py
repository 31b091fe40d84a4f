"""Every number of a configuration has bounds, which exclude NaN and the infinities."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args, get_origin

import msgspec
import pytest

from asterism.configs.load import load_run
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import find_annotation, find_section, get_field_types


def list_number_keys(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield all keys that take a number or an array of numbers."""
    for key, annotation in get_field_types(section).items():
        if inner := find_section(annotation):
            yield from list_number_keys(inner, f"{prefix}{key}.")
        elif contains_number(annotation):
            yield prefix + key


def contains_number(annotation: object) -> bool:
    return annotation in (int, float) or any(map(contains_number, get_args(annotation)))


def find_bounds(key: str) -> tuple[type, float, float]:
    """Return the key's type and its lower and upper bound; an exclusive bound counts as a bound, too."""
    annotation = find_annotation(RunConfig, key.split("."))
    if get_origin(annotation) in (tuple, dict):
        annotation = get_args(annotation)[-1 if get_origin(annotation) is dict else 0]
    assert get_origin(annotation) is Annotated, f"{key} has no bounds"
    kind, meta = get_args(annotation)
    low, high = (meta.ge if meta.gt is None else meta.gt), (meta.le if meta.lt is None else meta.lt)
    assert low is not None, f"{key} has no lower bound"
    assert high is not None, f"{key} has no upper bound"
    return kind, low, high


@pytest.mark.parametrize("key", [*list_number_keys(RunConfig)])
def test_every_number_has_bounds(tmp_path: Path, key: str) -> None:
    array = next((array for array in ("tasks", "evaluation.sets", "sft.mixture") if key.startswith(f"{array}.")), "")
    shown = key.replace(f"{array}.", f"{array}[0].") if array else key
    key = key.replace(f"{array}.", f"{array}.t.") if array else key
    text = f'name = "a"\n[[{array}]]\nname = "t"\ndata = "rows.jsonl"' if array else 'name = "a"'
    config = tmp_path / "my.toml"
    config.write_text(text)
    kind, low, high = find_bounds(key)
    below, above = (low - 1, high + 1) if kind is int else (math.nextafter(low, -math.inf), 1.0001 * high)
    for value in (below, above, math.nan, math.inf, -math.inf):
        value = f"[{value}, {value}]" if key == "learner.optimizer.betas" else value
        value = f"{{some = {value}}}" if key.endswith("reward.weights") else value
        with pytest.raises(ConfigError) as caught:
            load_run(config, [f"{key}={value}"])
        assert f"`{shown}" in str(caught.value)
