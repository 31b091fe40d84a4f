"""A sequence runs the stages of [[stages]] one after the other, each in its own folder.

    runs/NAME/stages.json              the names of the stages, in order
    runs/NAME/1_FIRST/, 2_SECOND/      run folders
    runs/NAME/unsolved_SECOND.jsonl    training data of a stage with problems = "unsolved"
    runs/NAME/stages.png               reward, length and share at the length limit over all stages

After any kill, `--resume` skips the finished stages and resumes the first unfinished one. A stage that has a checkpoint
resumes without the logs of the previous stage.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from asterism.actors.launch.claim_run_folder import RunFolderError, delete_run
from asterism.actors.stages.stage_runs import (
    FinishedStage,
    check_stage,
    continue_stage,
    find_start,
    read_start,
    write_unsolved,
)
from asterism.configs.atomic_write import write_atomically
from asterism.configs.errors import UnusableInput
from asterism.configs.load import list_resume_conflicts, load_run
from asterism.configs.loading.stage_layers import StageConfig
from asterism.configs.run_folder import RunFolder, StagesFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps

Stages = Sequence[tuple[StageConfig, RunConfig]]  # at least one stage
RunStage = Callable[[RunConfig, bool], int]  # gets whether to resume the run; returns the exit code


class StageSelection(NamedTuple):
    """Flags of `asterism run`."""

    resume: bool = False
    overwrite: bool = False
    first: str = ""  # name of the stage to begin with; empty: the first stage


def find_first_stage(stages: Stages, selection: StageSelection) -> int:
    """Return the index of the stage. Raises UnusableInput for an unknown one."""
    name, names = selection.first, [options.name for options, _ in stages]
    if not name:
        return 0
    if name not in names:
        raise UnusableInput(f"--from-stage {name}: no such stage; known are: {', '.join(names)}")
    return names.index(name)


def count_stages_to_run(stages: Stages, selection: StageSelection) -> int:
    """Count the stages that a node joins. A node that does not see the run's folder counts finished stages, too."""
    first = find_first_stage(stages, selection)
    folders = list_stage_folders(stages)[first:]
    return len(folders) if selection.overwrite else sum(not folder.summary.exists() for folder in folders)


def list_stage_folders(stages: Stages) -> list[RunFolder]:
    base = stages[0][1]
    folder = StagesFolder(Path(base.runs_folder) / base.name)
    return [folder.get_stage(number, options.name) for number, (options, _) in enumerate(stages, 1)]


class StageSequence:
    """Stages of one run. Raises UnusableInput for an unknown stage, or for folders that the flags do not permit."""

    def __init__(
        self,
        stages: Stages,
        selection: StageSelection,
        print_line: Callable[[str], None],
    ) -> None:
        self._stages = stages
        self._selection = selection
        self._print_line = print_line
        self._folders = list_stage_folders(stages)
        self.folder = StagesFolder(self._folders[0].path.parent)
        self._first = find_first_stage(stages, selection)
        self._check_stages()
        self._prepare_folder()

    def run(self, run_stage: RunStage) -> int:
        """Run the stages; return the first exit code other than 0, or 0. Raises UnusableInput and DiskError."""
        before: FinishedStage | None = None
        for index, (options, run) in enumerate(self._stages):
            folder, run = self._folders[index], replace(run, name=f"{run.name}/{self._folders[index].path.name}")
            if index < self._first:
                before = self._get_finished(index)
                continue
            if before is not None:
                run = self._continue(index, run, before)
            if folder.summary.exists():
                before = self._get_finished(index, expected=run)
                self._print_line(f"stage {options.name}: finished, in {folder.path}")
                continue
            self._print_line(f"stage {index + 1} of {len(self._stages)}: {options.name}")
            if code := run_stage(run, self._selection.resume and folder.config.exists()):
                return code
            before = FinishedStage(run, folder)
        return 0

    def _continue(self, index: int, run: RunConfig, before: FinishedStage) -> RunConfig:
        options, folder, first = self._stages[index][0], self._folders[index], self._folders[0]
        if folder.summary.exists() or list_saved_steps(folder.checkpoints):
            return continue_stage(run, options, read_start(load_run(folder.config)), first)
        start = find_start(run, options, before, first)
        if options.problems == "unsolved":
            write_unsolved(options, before, first, self._print_line)
        return continue_stage(run, options, start, first)

    def _check_stages(self) -> None:
        """Check, before a stage trains, that each stage can continue the previous one. Raises UnusableInput."""
        for index in range(max(1, self._first), len(self._stages)):
            options, run = self._stages[index]
            before = self._get_finished(index - 1).run if index == self._first else self._stages[index - 1][1]
            check_stage(run, options, before)

    def _prepare_folder(self) -> None:
        path, selection = self.folder.path, self._selection
        if selection.resume and selection.overwrite:
            raise RunFolderError("--resume continues a run and --overwrite deletes it; use only one of them")
        if RunFolder(path).config.exists():
            raise RunFolderError(f"{path}: a run without stages; choose another folder with --name")
        if (
            path.is_dir()
            and not self.folder.record.exists()
            and (foreign := sorted(each.name for each in path.iterdir()))
        ):
            raise RunFolderError(
                f"{path}: not the folder of a run with stages, since it contains {foreign[0]}; choose another with --name"
            )
        if not selection.overwrite and self.folder.record.exists():
            self._check_record()
        for index in range(self._first):
            self._get_finished(index)
        begun = [folder for folder in self._folders[self._first :] if folder.config.exists()]
        if begun and not (selection.resume or selection.overwrite):
            raise RunFolderError(
                f"{begun[0].path}: this stage exists; --resume continues the run, --overwrite deletes this stage and "
                "those after it, --name starts another run"
            )
        if selection.resume and not self.folder.record.exists():
            raise RunFolderError(f"{path}: there is no run to resume")
        if selection.overwrite:
            for folder in reversed(begun):  # a kill leaves no later stage without its predecessor
                delete_run(folder)
        path.mkdir(parents=True, exist_ok=True)
        names = [options.name for options, _ in self._stages]
        write_atomically(self.folder.record, msgspec.json.format(msgspec.json.encode({"stages": names})) + b"\n")

    def _check_record(self) -> None:
        """Check that stages that have begun keep their names and numbers. Raises RunFolderError."""
        begun = [folder.path.name for folder in self.folder.list_begun()]
        names = [folder.path.name for folder in self._folders]
        if not set(begun) <= set(names):
            raise RunFolderError(
                f"{self.folder.path}: the stages {', '.join(begun)} have begun, but [[stages]] has {', '.join(names)}; "
                "restore the names and order of these stages, or choose another folder with --name"
            )

    def _get_finished(self, index: int, expected: RunConfig | None = None) -> FinishedStage:
        """Return the finished stage. Raises RunFolderError if it is unfinished, or has another configuration."""
        options, folder = self._stages[index][0], self._folders[index]
        if not folder.summary.exists():
            raise RunFolderError(
                f"--from-stage {self._selection.first}: stage {options.name} before it is not finished: {folder.path}"
            )
        run = load_run(folder.config)
        if expected is not None and (changed := list_resume_conflicts(run, expected)):
            listed = "\n  ".join(changed)
            raise RunFolderError(
                f"{folder.path}: this stage is finished with another configuration:\n  {listed}\n"
                f"restore these keys, or repeat it with --from-stage {options.name} --overwrite"
            )
        return FinishedStage(run, folder)
