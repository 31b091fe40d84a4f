"""One changed byte in a file of a finished or interrupted run has no effect, or it causes an error."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import MANIFEST_NAME, list_files
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import Start, finish, metrics, read_conserved_summary
from tests.damage.flips import flip_file
from tests.damage.readers import FileKind, find_kind

NUM_POSITIONS = 32


@pytest.fixture(scope="module")
def interrupted_run(tmp_path_factory: pytest.TempPathFactory, start: Start) -> RunFolder:
    """Return a run that ^C has interrupted after two steps."""
    runs = tmp_path_factory.mktemp("interrupted")
    run = start(runs, "rl.steps=20")
    run.wait_for("step", 2)
    run.process.send_signal(signal.SIGINT)
    run.end(130)
    return run.folder


def copy_run(run: RunFolder, target: Path) -> RunFolder:
    shutil.copytree(run.path, target, symlinks=True)
    return RunFolder(target)


def list_damaged_results(folder: RunFolder, num_positions: int, seed: int) -> Iterator[str]:
    """Describe each flip that changes the result of a reader without an error."""
    for file in [*list_files(folder.path), folder.path / MANIFEST_NAME]:
        kind = find_kind(folder, file)
        if kind is None:
            yield f"{file.relative_to(folder.path)}: no kind in tests/damage/readers.py"
        else:
            yield from _list_of_file(folder, file, kind, num_positions, seed)


def _list_of_file(folder: RunFolder, file: Path, kind: FileKind, num_positions: int, seed: int) -> Iterator[str]:
    expected = [reader(folder, file) for reader in kind.readers]
    for number, _ in enumerate(flip_file(file, num_positions, seed) if kind.readers else ()):
        for reader, (place, result) in zip(kind.readers, enumerate(expected, 1), strict=True):
            try:
                found = reader(folder, file)
            except UnusableInput:
                continue
            if found != result:
                yield f"{file.relative_to(folder.path)}: flip {number}: reader {place} of {kind.pattern} returns another result"


@pytest.mark.slow
def test_no_flip_in_a_finished_run_changes_a_result_silently(
    finished_run: tuple[RunFolder, str], tmp_path: Path
) -> None:
    folder = copy_run(finished_run[0], tmp_path / "demo")
    assert list(list_damaged_results(folder, 4, seed=1)) == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ending", ["finished", "interrupted"])
def test_many_flips_in_any_file_change_no_result_silently(
    ending: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    made = request.getfixturevalue(f"{ending}_run")
    folder = copy_run(made[0] if ending == "finished" else made, tmp_path / "demo")
    assert list(list_damaged_results(folder, NUM_POSITIONS, seed=2)) == []


@pytest.mark.nightly
def test_a_resume_names_damaged_files_and_falls_back_to_an_intact_checkpoint(
    interrupted_run: RunFolder, start: Start
) -> None:
    folder = interrupted_run
    for name in ("metrics.jsonl", "events/head.sqlite", "logs/head.jsonl", "boots"):
        for _ in flip_file(folder.path / name, 1, seed=3):
            run = start(folder.path.parent, "rl.steps=20", "--resume")
            assert f"{folder.path / name}: damaged" in " ".join(finish(run.process).split())
            assert run.process.returncode != 0
    newest = max(folder.checkpoints.glob("step_*"))
    step = int(newest.name.removeprefix("step_"))
    (tensors,) = newest.glob("trainer/tensors/*.distcp")
    content = tensors.read_bytes()
    tensors.write_bytes(content[: len(content) // 2])
    output = start(folder.path.parent, "rl.steps=20", "--resume").succeed()
    assert f"the checkpoint of step {step} is damaged ({tensors}: damaged" in " ".join(output.split())
    assert f"resuming after step {step - 1}" in output
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert [line["step"] for line in metrics(folder, "step")] == list(range(1, 21))
    read_conserved_summary(folder)
