"""A launch claims a run's folder: a new one, one to resume, or one to overwrite."""

import fcntl
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from asterism.actors.launch.host_address import check_port_free
from asterism.actors.launch.run_manifest import check_run_files, remove_run_manifest, write_run_manifest
from asterism.bus.event_log.reader import read_events
from asterism.bus.process.scratch_lock import holding_scratch, remove_stale_scratch
from asterism.bus.transport.curve_auth import load_key
from asterism.configs.atomic_write import sync_paths
from asterism.configs.choices.sink_kinds import SINK_KINDS
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.load import list_resume_conflicts, load_run, write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import read_task_descriptions, write_task_descriptions
from asterism.policies.tools.task_description import TaskDescription

MIN_FREE_MIB = 64


class RunFolderError(UnusableInput):
    """The run cannot use its folder. `str(error)` has the reason and the flag that helps."""


class RunAlreadyFinished(Exception):
    """The run has nothing to resume. `str(error)` names the summary."""


@contextmanager
def claimed_run_folder(run: RunConfig, *, resume: bool, overwrite: bool) -> Generator[RunFolder]:
    """Yield the run's folder with its resolved configuration, locked for this process.

    At the end the folder gets a manifest of its files, which a resume checks. Raises RunFolderError, RunAlreadyFinished,
    and UnusableInput for an unusable cluster key or address, and for a damaged file.
    """
    if resume and overwrite:
        raise RunFolderError("--resume continues a run and --overwrite deletes it; use only one of them")
    folder = RunFolder(Path(run.runs_folder) / run.name)
    if resume and not folder.config.exists():  # raises before the folder is made
        raise RunFolderError(f"{folder.path}: there is no run to resume")
    with ExitStack() as exit_stack:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            lock = exit_stack.enter_context(folder.lock.open("a+"))
            _acquire_lock(lock.fileno(), folder)
            _check_cluster(run)
            if resume:
                check_run_files(folder)
            _prepare_folder(run, folder, resume=resume, overwrite=overwrite)
            remove_run_manifest(folder)
            check_disk_space(folder.path)
            write_resolved(run, folder.config)
            exit_stack.enter_context(scratch_folders(folder))
        except OSError as error:
            raise RunFolderError(f"{error.filename or folder.path}: {error.strerror}") from error
        try:
            yield folder
        finally:
            write_run_manifest(folder, has_other_nodes=bool(run.cluster.key))


def delete_run(folder: RunFolder) -> None:
    """Delete the run except its lock. Raises OSError, and RunFolderError if a run uses the folder."""
    with folder.lock.open("a+") as lock:
        _acquire_lock(lock.fileno(), folder)
        _delete_content(folder)


def keep_task_descriptions(folder: RunFolder, descriptions: Mapping[str, TaskDescription]) -> None:
    """Write the descriptions for the run's processes. Raises RunFolderError if a resumed run has changed one."""
    before = read_task_descriptions(folder) if folder.task_descriptions.exists() else {}
    if changed := [name for name, each in before.items() if descriptions.get(name) != each]:
        name = changed[0]
        subject, remedy = (f"task {name}", f"restore tasks.{name}.import") if name else ("its task", "restore tasks")
        raise RunFolderError(
            f"{folder.path}: this run began with other tools or texts of {subject}, and its log cannot be replayed "
            f"with the present ones; {remedy}, or start another run with --name"
        )
    write_task_descriptions(folder, descriptions)


@contextmanager
def scratch_folders(folder: RunFolder) -> Generator[None]:
    """Make empty folders for sockets and shared memory, and remove them at the end. First remove those of dead runs."""
    remove_stale_scratch()
    with holding_scratch(folder.sockets), holding_scratch(folder.shared_memory):
        yield


def _acquire_lock(lock_fd: int, folder: RunFolder) -> None:
    """Lock the folder. The kernel releases the lock when this process ends, also after a kill."""
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = folder.lock.read_text().strip()
        raise RunFolderError(
            f"{folder.path}: a run is using this folder (process {holder}); choose another with --name"
        ) from None
    os.ftruncate(lock_fd, 0)
    os.write(lock_fd, f"{os.getpid()}\n".encode())


def _check_cluster(run: RunConfig) -> None:
    """Check key and port before anything is deleted or written. Raises UnusableInput."""
    if run.cluster.key:
        load_key(Path(run.cluster.key))
        if run.cluster.host:
            check_port_free(
                run.cluster.host, run.cluster.port, "set another address with cluster.host and cluster.port"
            )


def _prepare_folder(run: RunConfig, folder: RunFolder, *, resume: bool, overwrite: bool) -> None:
    if not folder.config.exists():
        if foreign := sorted(path.name for path in folder.path.iterdir() if path != folder.lock):
            raise RunFolderError(
                f"{folder.path}: not a run folder, since it contains {foreign[0]}; choose another with --name"
            )
        return
    if overwrite or not _has_begun(folder):
        _delete_content(folder)
        return
    changed = list_resume_conflicts(load_run(folder.config), run)
    if changed:
        listed = "\n  ".join(changed)
        raise RunFolderError(
            f"{folder.path}: this run exists with another configuration:\n  {listed}\n"
            f"{_suggest_name(run)}; to --resume this run, restore these keys; --overwrite deletes it"
        )
    if resume and folder.summary.exists():
        raise RunAlreadyFinished(f"{folder.path}: this run is finished; its results are in {folder.summary}")
    if not resume:
        is_finished = folder.summary.exists() or folder.results.exists()
        state = "is finished" if is_finished else "was not finished; --resume continues it"
        raise RunFolderError(
            f"{folder.path}: this run exists and {state}; {_suggest_name(run)}; --overwrite deletes it"
        )


def _delete_content(folder: RunFolder) -> None:
    """Delete all except the lock. The configuration is deleted last: it marks the folder as a run's."""
    for path in sorted(folder.path.iterdir(), key=lambda path: path == folder.config):
        if path != folder.lock:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _has_begun(folder: RunFolder) -> bool:
    """Return whether the folder has a checkpoint, an event, or a file that no failed start leaves."""
    left_by_failed_start = {
        *(folder.config, folder.lock, folder.launch_counter, folder.problem_counts, folder.task_descriptions),
        folder.provenance,
        folder.path / MANIFEST_NAME,
        folder.data_digests,
        *(folder.logs, folder.events, folder.data, folder.checkpoints, folder.batches, folder.path / "isolation"),
        # Without a line of metrics a sink's store has no record.
        *(folder.sinks, *(folder.path / sink.store for sink in SINK_KINDS.values())),
    }
    made_at_start = folder.metrics, folder.answers  # both files are empty at the start
    left = {path for path in folder.path.iterdir() if path not in made_at_start or path.stat().st_size}
    if left - left_by_failed_start or any(folder.checkpoints.glob("step_*")):
        return True
    return any(event.kind != "RunStarted" for log in folder.events.glob("*.sqlite") for event, _ in read_events(log))


def _suggest_name(run: RunConfig) -> str:
    """Suggest the first free name with a number at its end. The name of an evaluation ends with a step, which stays."""
    stem = run.name if run.evaluation.only else re.sub(r"-\d+$", "", run.name)
    free = next(name for number in count(2) if not (Path(run.runs_folder) / (name := f"{stem}-{number}")).exists())
    return f"--name {free} starts another run"


def check_disk_space(folder: Path) -> None:
    """Raise RunFolderError if the disk has less than MIN_FREE_MIB of free space."""
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < MIN_FREE_MIB:
        raise RunFolderError(f"{folder}: {free_mib} MiB free on this disk; a run needs at least {MIN_FREE_MIB}")


def increment_counter(path: Path) -> int:
    """Write and return the new count, from 1, also after a power failure. Raises UnusableInput and OSError."""
    text = path.read_bytes().strip() if path.exists() else b"0"
    if not text.isdigit():
        raise UnusableInput(
            f"{path}: not a number: {text[:40]!r}; replace it with a number higher than any earlier one"
        )
    number, new = int(text) + 1, path.with_name(f"{path.name}.new")
    new.write_text(f"{number}\n")
    sync_paths([new])
    new.replace(path)
    sync_paths([path.parent])
    return number
