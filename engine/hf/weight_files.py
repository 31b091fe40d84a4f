"""The weight files of a transformers folder and their headers, without torch."""

import json
import struct
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any, cast

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file


class CheckpointError(UnusableInput):
    """A folder without a usable model. The message names the file and the problem."""


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files of the index, or the only file without an index. Raises CheckpointError for an invalid index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = read_json_object(index).get("weight_map")
    files = cast(dict[str, object], names).values() if isinstance(names, dict) else ()
    if not files or not all(isinstance(name, str) for name in files):
        raise CheckpointError(f"{index}: weight_map is missing, or is not an object that names the file of each tensor")
    return [folder / name for name in sorted(set(cast(Collection[str], files)))]


def count_parameters(folder: Path) -> int:
    """Count the parameters in the weight files. Raises CheckpointError for a missing or incomplete file."""
    return sum(prod(shape) for file in list_weight_files(folder) for shape in read_weight_shapes(file).values())


def read_weight_shapes(path: Path) -> dict[str, list[int]]:
    """Read the shape of each tensor from the header. Raises CheckpointError, also if the file has a wrong size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = msgspec.json.decode(file.read(min(length, size)), type=dict[str, _TensorHeader])
    except OSError as error:
        raise CheckpointError(f"{path}: {_describe(error)}") from None
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or incomplete: {error}") from None
    header.pop("__metadata__", None)
    if size != (expected := 8 + length + max((each.data_offsets[1] for each in header.values()), default=0)):
        raise CheckpointError(f"{path}: incomplete: {size:,} of {expected:,} bytes")
    return {name: each.shape for name, each in header.items()}


class _TensorHeader(msgspec.Struct):
    """The header of one tensor. It is empty for the entry `__metadata__`."""

    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError, and DamagedFile if the folder's manifest has another digest."""
    check_file(path)
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
