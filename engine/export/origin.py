"""The origin of an imported model, which its folder, the checkpoints of its runs and their exports keep."""

from pathlib import Path
from typing import TypeVar

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file

Kind = TypeVar("Kind")
ORIGIN_FILE, LICENSE_FILE = "origin.json", "LICENSE"


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of `origin.json`."""

    file: str  # name of the imported file
    sha256: str
    format: str  # GGUF, and the types of its weights
    name: str = ""  # name of the model, as the file states it
    organization: str = ""
    license: str = ""  # SPDX identifier in lower case, such as apache-2.0
    source: str = ""  # where the file comes from, such as the name of a package


def read_origin(folder: Path) -> Origin | None:
    """Return the origin, or None without the file. Raises UnusableInput for a broken file."""
    return read_optional_struct(folder / ORIGIN_FILE, Origin)


def read_optional_struct(path: Path, kind: type[Kind]) -> Kind | None:
    """Return the struct in a JSON file, or None without the file. Raises UnusableInput for a broken file."""
    check_file(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None
    except (OSError, msgspec.MsgspecError) as error:
        raise UnusableInput(f"{path}: {error}") from None
