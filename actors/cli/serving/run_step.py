"""The argument RUN[:STEP] of `asterism export` and `asterism serve`.

runs/demo, demo          the last checkpoint; a bare name is that of a run in runs/
demo:40, demo:best       the checkpoint of a step, and the best evaluated one
"""

from pathlib import Path
from typing import NamedTuple

from configs.errors import UnusableInput
from configs.run_folder import RunFolder, StagesFolder
from engine.learner.best_checkpoint import get_best_checkpoint_path, read_best_checkpoint
from engine.learner.checkpoints import CHECKPOINT_NAME

_RUNS = Path("runs")
_LAST, _BEST = "last", "best"


class RunStep(NamedTuple):
    run: RunFolder
    step: int

    @property
    def checkpoint(self) -> Path:
        return self.run.get_checkpoint_path(self.step)


def find_run_step(text: str) -> RunStep:
    """Raises UnusableInput, which lists the steps of the run."""
    name, colon, step = text.rpartition(":")
    if (run := _find_run(text)) is not None:
        return _choose_step(run, _LAST)
    if colon and (run := _find_run(name)) is not None:
        return _choose_step(run, step)
    raise UnusableInput(f"{text}: no such run, neither here nor in {_RUNS}/; expected RUN, RUN:STEP or RUN:{_BEST}")


def find_run_folder(text: str) -> RunFolder | None:
    """Of RUN or RUN:STEP."""
    return _find_run(text) or _find_run(text.rpartition(":")[0])


def _find_run(text: str) -> RunFolder | None:
    folders = (Path(text), _RUNS / text) if text else ()
    for path in folders:
        StagesFolder(path).refuse()
    return next((run for run in map(RunFolder, folders) if run.config.is_file()), None)


def _choose_step(run: RunFolder, wanted: str) -> RunStep:
    names = (CHECKPOINT_NAME.fullmatch(path.name) for path in run.checkpoints.glob("step_*"))
    steps = sorted(int(name[1]) for name in names if name)
    if not steps:
        raise UnusableInput(f"{run.path}: has no checkpoint yet")
    known = f"{run.path} has the steps {', '.join(map(str, steps))}"
    if wanted == _LAST:
        return RunStep(run, steps[-1])
    if wanted == _BEST:
        best = read_best_checkpoint(run.checkpoints)
        if best is None:
            missing = get_best_checkpoint_path(run.checkpoints).name
            raise UnusableInput(f"{run.path}:{_BEST}: the run has no {missing} (evaluation.every, keep_best); {known}")
        wanted = str(best.step)
    number = (CHECKPOINT_NAME.fullmatch(wanted) or [wanted, wanted])[1]
    if not number.isdecimal():
        raise UnusableInput(f'{run.path}:{wanted}: expected a step, "{_LAST}" or "{_BEST}"; {known}')
    if int(number) not in steps:
        raise UnusableInput(f"{run.path}:{wanted}: has no such checkpoint; {known}")
    return RunStep(run, int(number))
