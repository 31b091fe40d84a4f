"""The weight files of a transformers folder and their headers, without torch."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any, cast

from configs.errors import UnusableInput


class CheckpointError(UnusableInput):
    """A folder without a usable model. The message names the file and the problem."""


def list_weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = read_json_object(index).get("weight_map")
        if not isinstance(files, dict):
            raise CheckpointError(f"{index}: weight_map is missing or no object")
        return [folder / name for name in sorted(set(cast("dict[str, str]", files).values()))]
    return [folder / "model.safetensors"]


def count_parameters(folder: Path) -> int:
    """Raises CheckpointError for a missing or incomplete file."""
    headers = [read_safetensors_header(file) for file in list_weight_files(folder)]
    return sum(prod(entry["shape"]) for header in headers for entry in header.values())


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """By tensor: dtype, shape, data_offsets. Raises CheckpointError, also if the file is shorter than its tensors."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, dict[str, Any]] = json.loads(file.read(min(length, path.stat().st_size)))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise CheckpointError(f"{path}: {_describe(error)}") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or incomplete: {error}") from None
    if (found := path.stat().st_size) != (expected := 8 + length + end):
        raise CheckpointError(f"{path}: incomplete: {found:,} of {expected:,} bytes")
    return header


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {_describe(error)}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _describe(error: OSError) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
