"""`asterism model import` converts a GGUF file into a transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from asterism.actors.cli.serving.export_command import check_content, check_dtype, check_target
from asterism.configs.atomic_write import locking_folder
from asterism.configs.errors import UnusableInput
from asterism.engine.export.gguf_import import GgufSource, import_gguf


class ImportOptions(NamedTuple):
    dtype: str
    license_file: Path | None
    source: str
    overwrite: bool


def import_file(file: Path, folder: Path, options: ImportOptions, console: Console) -> None:
    """Write the folder. Raises UnusableInput: unusable file or option, or a folder with other files."""
    dtype = check_dtype(options.dtype)
    check_target(folder)
    if options.license_file is not None and not options.license_file.is_file():
        raise UnusableInput(f"--license {options.license_file}: no such file")
    with locking_folder(folder):
        check_content(folder, overwrite=options.overwrite)
        config = import_gguf(GgufSource(file, options.license_file, options.source), folder, dtype)
    size = f"{config.count_parameters():,} parameters in {options.dtype}"
    console.print(f"{escape(str(folder))}: {config.model_type}, {size}", soft_wrap=True)
    console.print(f"use it: model.checkpoint = {escape(str(folder))}", soft_wrap=True)
