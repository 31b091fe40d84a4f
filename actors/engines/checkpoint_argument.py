"""The checkpoint argument of a command names a model: a folder, a run or one of its steps, or the URL of a server.

models/qwen3                        a transformers folder
runs/demo/checkpoints/step_000040   a checkpoint of a run
runs/demo                           the newest checkpoint of a run that has an exported model
runs/demo:40, demo:best, demo:last  a step of the run; a bare name stands for a run in runs/
http://localhost:30000/v1           a server with OpenAI's completions API
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder, StagesFolder
from asterism.engine.hf.weight_files import list_weight_files
from asterism.engine.learner.checkpoints.best_checkpoint import get_best_checkpoint_path, read_best_checkpoint
from asterism.engine.learner.checkpoints.checkpoint_folders import CHECKPOINT_NAME

RUNS_FOLDER = "runs"
_LAST, _BEST = "last", "best"


class RunStep(NamedTuple):
    run: RunFolder
    step: int

    @property
    def checkpoint(self) -> Path:
        return self.run.get_checkpoint_path(self.step)


class CheckpointArgument(NamedTuple):
    """A parsed argument. `folder` has config.json, weights and tokenizer; without a folder there is a URL."""

    text: str  # argument as given
    folder: Path | None
    run: RunFolder | None = None  # run of the checkpoint, if it belongs to one
    step: int | None = None  # number of RL steps before this checkpoint of a run
    url: str = ""


def parse_checkpoint_argument(text: str) -> CheckpointArgument:
    """Parse the argument. Raises UnusableInput, which lists the steps of a run."""
    if "://" in text:
        return CheckpointArgument(text, None, url=_check_url(text))
    path = Path(text)
    if (path / "config.json").is_file():
        return _describe_folder(text, path)
    if (run := _find_run(text)) is not None:
        return _choose_step(text, run, "")
    name, colon, step = text.rpartition(":")
    if colon and (run := _find_run(name)) is not None:
        return _choose_step(text, run, step)
    if path.is_dir():
        raise UnusableInput(f"{text}: is neither a model's folder (config.json) nor a run's (config.toml)")
    raise UnusableInput(f"{text}: no such folder; expected a model's folder, RUN, RUN:STEP or the URL of a server")


def find_run_step(text: str) -> RunStep:
    """Find RUN, RUN:STEP or the folder of a checkpoint; the step needs no exported model. Raises UnusableInput,
    which lists the steps."""
    name, colon, wanted = text.rpartition(":")
    if (found := find_checkpoint_folder(Path(text))) is not None:
        run, wanted = found.run, str(found.step)
    elif (run := _find_run(text)) is not None:
        wanted = ""
    elif not colon or (run := _find_run(name)) is None:
        raise UnusableInput(
            f"{text}: no such run, neither here nor in {RUNS_FOLDER}/; expected RUN, RUN:STEP or RUN:{_BEST}"
        )
    return RunStep(run, _pick_step(text, run, wanted, _list_checkpoint_steps(run), "checkpoint"))


def find_run_folder(text: str) -> RunFolder | None:
    """Return the run that RUN, RUN:STEP or a checkpoint's folder names, or None if it does not exist."""
    found = find_checkpoint_folder(Path(text))
    return found.run if found is not None else _find_run(text) or _find_run(text.rpartition(":")[0])


def find_checkpoint_folder(path: Path) -> RunStep | None:
    """Return the run and the step of a checkpoint's folder, or None for another folder."""
    resolved = path.resolve()
    run, name = RunFolder(resolved.parent.parent), CHECKPOINT_NAME.fullmatch(resolved.name)
    if name is None or resolved.parent != run.checkpoints or not run.config.is_file():
        return None
    return RunStep(run, int(name[1]))


def list_exported_steps(run: RunFolder) -> list[int]:
    """List the steps of which the run has kept an exported model, in ascending order."""
    return [step for step in _list_checkpoint_steps(run) if _has_model(run.get_checkpoint_path(step))]


def _list_checkpoint_steps(run: RunFolder) -> list[int]:
    names = (CHECKPOINT_NAME.fullmatch(path.name) for path in run.checkpoints.glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def _check_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UnusableInput(f"{text}: expected the URL of a server, such as http://localhost:30000/v1")
    return text


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and all(file.is_file() for file in list_weight_files(folder))


def _describe_folder(text: str, path: Path) -> CheckpointArgument:
    """Describe a model's folder, with its run and step if it is a run's checkpoint."""
    found = find_checkpoint_folder(path)
    if not _has_model(path):
        if found is not None:
            raise UnusableInput(
                f"{text}: has no exported model (learner.checkpoints.export_every); {_list_steps(found.run)}"
            )
        absent = next(file for file in (path / "config.json", *list_weight_files(path)) if not file.is_file())
        raise UnusableInput(f"{absent}: no such file; expected the whole folder of a model")
    return CheckpointArgument(text, path, *found) if found is not None else CheckpointArgument(text, path)


def _find_run(text: str) -> RunFolder | None:
    """Return the run in this folder, or the run of this name in runs/, or None without either."""
    folders = (Path(text), Path(RUNS_FOLDER) / text) if text else ()
    for path in folders:
        StagesFolder(path).refuse()
    return next((run for run in map(RunFolder, folders) if run.config.is_file()), None)


def _choose_step(text: str, run: RunFolder, wanted: str) -> CheckpointArgument:
    step = _pick_step(text, run, wanted, list_exported_steps(run), "exported model")
    return CheckpointArgument(text, run.get_checkpoint_path(step), run, step)


def _pick_step(text: str, run: RunFolder, wanted: str, steps: Sequence[int], kind: str) -> int:
    """Return the step that `wanted` names: a number, a checkpoint's folder name, "best", or "last" or empty for the
    newest. `steps` are the steps with a `kind`."""
    if not steps:
        raise UnusableInput(f"{text}: {run.checkpoints} has no {kind} yet")
    known = f"{run.path} has the steps {', '.join(map(str, steps))}"
    if wanted in ("", _LAST):
        return steps[-1]
    if wanted == _BEST:
        best = read_best_checkpoint(run.checkpoints)
        if best is None:
            missing = get_best_checkpoint_path(run.checkpoints).name
            raise UnusableInput(f"{text}: the run has no {missing} (evaluation.every, keep_best); {known}")
        wanted = str(best.step)
    number = (CHECKPOINT_NAME.fullmatch(wanted) or [wanted, wanted])[1]
    if not number.isdecimal():
        raise UnusableInput(f'{text}: expected a number, "{_LAST}" or "{_BEST}" after the colon; {known}')
    if int(number) not in steps:
        raise UnusableInput(f"{text}: no {kind} of step {int(number)}; {known}")
    return int(number)


def _list_steps(run: RunFolder) -> str:
    steps = ", ".join(map(str, list_exported_steps(run))) or "none"
    return f"{run.path} has the steps {steps}"
