"""Digests of a run's data files are fixed at its first start: a resumed run must read the same rows."""

from collections.abc import Iterator

import msgspec

from asterism.configs.atomic_write import write_atomically
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import digest_file
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.data_files import list_data_files

DataDigests = dict[str, dict[str, str]]  # configuration key -> path of the file -> digest


def keep_data_digests(folder: RunFolder, run: RunConfig) -> None:
    """Write the digests at the first start. Reads all data files, about 0.3 s per GB from the page cache.

    Raises UnusableInput, which names the file and its key, if a resumed run began with other data.
    """
    path, present = folder.data_digests, compute_data_digests(folder, run)
    if not path.exists():
        write_atomically(path, msgspec.json.format(msgspec.json.encode(present)) + b"\n")
        return
    try:
        before = msgspec.json.decode(path.read_bytes(), type=DataDigests)
    except msgspec.MsgspecError as error:
        raise UnusableInput(
            f"{path}: damaged: {error}; restore it from a copy, or delete it to accept the data"
        ) from None
    if change := _describe_change(before, present):
        raise UnusableInput(
            f"{change} since the run in {folder.path} began; restore the file, or start another run with --name"
        )


def compute_data_digests(folder: RunFolder, run: RunConfig) -> DataDigests:
    """Compute the digests of all files except those that the program of [prepare] writes.

    Raises UnusableInput for a missing file.
    """
    digests: DataDigests = {}
    for key, file in _list_data_keys(run):
        if run.generates(file):
            continue
        try:
            digests[key] = {str(path): digest_file(path) for path in list_data_files(folder.expand_path(file))}
        except UnusableInput as error:
            raise UnusableInput(f"{key}: {error}") from None
        except OSError as error:
            raise UnusableInput(f"{key}: {error.filename}: cannot be read: {error.strerror}") from None
    return digests


def list_missing_files(folder: RunFolder, run: RunConfig) -> list[str]:
    """List the files that the run reads and the program of [prepare] has yet to write."""
    paths = (run.model.checkpoint, *(file for _, file in _list_data_keys(run)))
    return [path for path in paths if run.generates(path) and not folder.expand_path(path).exists()]


def _list_data_keys(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the configuration key and the path of each data set that the run reads."""
    is_evaluated, sets = run.evaluation.questions > 0, run.evaluation.sets
    for task in run.resolved_tasks:
        train_key, test_key = (
            (f"{task.key_prefix}data", f"{task.key_prefix}test") if task.name else ("data.train", "data.test")
        )
        yield from [(train_key, task.data)] if task.data else []
        yield from [(test_key, task.test)] if task.test and is_evaluated and not sets else []
    yield from ((f"evaluation.sets.{each.name}.data", each.data) for each in sets if each.data and is_evaluated)
    if run.sft.is_enabled:
        for key, each in (run.sft.files | run.sft.validation_files).items():
            yield key, each.data


def _describe_change(before: DataDigests, present: DataDigests) -> str | None:
    """Describe the first difference, in a file's content or in the files of a folder, or return None without one."""
    for key, files in present.items():
        known = before.get(key, {})
        for path in sorted({*files, *known}):
            if path not in known:
                return f"{path}: this file was added to {key}"
            if path not in files:
                return f"{path}: this file was removed from {key}"
            if files[path] != known[path]:
                return f"{path}: the content of {key} has changed"
    return None
