"""Stages run in order, as the flags of `asterism run` demand; these stages only write files of a finished run."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from asterism.actors.launch.claim_run_folder import RunFolderError
from asterism.actors.stages.stage_sequence import StageSelection, StageSequence, count_stages_to_run
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import BufferCursor, Envelope, StepCollected, StepCounts
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_stages, write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.checkpoints.checkpoint_folders import TrainerState, write_trainer_state
from asterism.tasks import MATH_PYTHON

CONFIG = """
name = "staged"
evaluation.questions = 0
sft.steps = 5
prepare.import = "asterism.tasks.tiny.prepare:TinyDemo"
[[stages]]
name = "short"
rl.steps = 4
[[stages]]
name = "longer"
rl.steps = 6
optimizer = "reset"
[[stages]]
name = "hard"
problems = "unsolved"
rl.steps = 2
"""
NEW_RUN = StageSelection()
POSITION = 96  # position in the training data after the last step


class Runs:
    """A runner of stages. `endings` has exit codes by name of the stage; the default is 0."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG)
        self.runs = folder / "runs"
        self.started: list[tuple[str, bool]] = []  # names of started stages, and whether each was resumed
        self.configurations: dict[str, RunConfig] = {}
        self.endings: dict[str, int] = {}
        self.printed: list[str] = []

    def run(self, selection: StageSelection = NEW_RUN, *overrides: str) -> int:
        stages = load_stages(self.config, (f'runs_folder="{self.runs}"', *overrides))
        self.started.clear()
        return StageSequence(stages, selection, self.printed.append).run(self._run_stage)

    def refuse(self, selection: StageSelection = NEW_RUN, *overrides: str) -> str:
        """Return the error of a run that must be refused."""
        with pytest.raises(UnusableInput) as refused:
            self.run(selection, *overrides)
        return str(refused.value)

    def _run_stage(self, run: RunConfig, resume: bool) -> int:
        folder = RunFolder(self.runs / run.name)
        name = folder.path.name
        self.started.append((name, resume))
        self.configurations[name] = run
        for path in (folder.data, folder.logs, folder.events):
            path.mkdir(parents=True, exist_ok=True)
        write_resolved(run, folder.config)
        self._write_checkpoint(folder, 0)
        if code := self.endings.get(name, 0):
            return code
        if name == "1_short":
            rows = [json.dumps({"question": f"{number}?", "answer": str(number)}) for number in range(4)]
            (folder.data / "train.jsonl").write_text("\n".join(rows) + "\n")
        self._write_end(folder, run)
        folder.summary.write_text("{}")
        folder.task_descriptions.write_bytes(msgspec.json.encode({"": MATH_PYTHON}))
        return 0

    def _write_end(self, folder: RunFolder, run: RunConfig) -> None:
        """Write a checkpoint, the data cursor of the last step, and logs with one solved problem."""
        self._write_checkpoint(folder, run.rl.steps)
        log = EventLog(folder.events / "head.sqlite")
        collected = StepCollected(run.rl.steps, 1, StepCounts(), {}, BufferCursor(POSITION))
        frame = encode(Envelope("head/buffer", "head/recipe", collected))
        log.append(0.0, "recipe", "head/buffer", "StepCollected", None, frame, epoch=1, number=1)
        log.close()
        problem = {"purpose": "train", "task": "", "problem": "train.jsonl:2", "size": 1}
        line = {"group_id": 1, "timestamp": "2026-11-26T10:00:00.5Z"}
        start = {"event": "group.started", **line, **problem}
        end = {"event": "trajectory.ended", **line, "trajectory_id": 7, "reward": 1.0}
        (folder.logs / "head.jsonl").write_text(json.dumps(start) + "\n")
        (folder.logs / "rollout-0.jsonl").write_text(json.dumps(end) + "\n")

    def _write_checkpoint(self, folder: RunFolder, step: int) -> None:
        checkpoint = folder.get_checkpoint_path(step)
        (checkpoint / "trainer").mkdir(parents=True, exist_ok=True)
        write_trainer_state(checkpoint, TrainerState("rl", step, 1, 0))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_each_stage_continues_the_previous_stage(runs: Runs) -> None:
    assert runs.run() == 0
    assert runs.started == [("1_short", False), ("2_longer", False), ("3_hard", False)]
    short, longer, hard = (runs.configurations[name] for name in ("1_short", "2_longer", "3_hard"))
    folder = (runs.runs / "staged").resolve()
    assert (short.sft.steps, short.learner.resume_from) == (5, "")
    assert short.prepare is not None
    checkpoint = str(folder / "1_short" / "checkpoints" / "step_000004")
    assert (longer.learner.resume_from, longer.model.checkpoint) == (checkpoint, checkpoint)
    assert (longer.sft.steps, longer.prepare, longer.learner.resume_optimizer) == (0, None, False)
    assert longer.rl.first_problem == POSITION
    assert longer.data.train == str(folder / "1_short" / "data" / "train.jsonl")
    assert hard.learner.resume_from == str(folder / "2_longer" / "checkpoints" / "step_000006")
    assert (hard.learner.resume_optimizer, hard.rl.first_problem) == (True, 0)


def test_the_data_of_a_stage_are_the_unsolved_problems(runs: Runs) -> None:
    runs.run()
    data = Path(runs.configurations["3_hard"].data.train)
    assert [json.loads(line)["question"] for line in data.read_text().splitlines()] == ["0?", "2?", "3?"]
    assert any("3 of 4 problems" in line for line in runs.printed)
    (warning,) = [line for line in runs.printed if line.startswith("warning: ")]
    assert warning.startswith("warning: 3 of these 3 problems are not known to be hard: stage ")


def test_new_data_start_at_their_beginning(runs: Runs) -> None:
    runs.run(NEW_RUN, "stages.longer.data.train=mine.jsonl", "stages.hard.problems=all")
    assert [run.rl.first_problem for run in runs.configurations.values()] == [0, 0, 0]


TASKS_OF_A_STAGE = CONFIG.replace('optimizer = "reset"', 'tasks = [{ name = "sql", data = "sql.jsonl" }]')


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TASKS_OF_A_STAGE, r"hard: .* needs the tasks of the stage before: sql instead of those of \[data\]"),
        (
            f'log.level = "warning"\n{CONFIG}',
            r'hard: problems = "unsolved" .* set log\.level = "info" instead of "warn',
        ),
        (f"log.events = false\nlog.verify = false\n{CONFIG}", r"longer: .*set log\.events = true, or problem_order"),
    ],
)
def test_a_stage_that_cannot_continue_the_previous_stage_is_refused_before_training(
    runs: Runs, config: str, message: str
) -> None:
    runs.config.write_text(config)
    with pytest.raises(UnusableInput, match=f"stages: {message}"):
        runs.run()
    assert not runs.started


def test_a_stage_that_fails_ends_the_run_and_resume_continues_with_this_stage(runs: Runs) -> None:
    runs.endings["2_longer"] = 1
    assert runs.run() == 1
    assert runs.started == [("1_short", False), ("2_longer", False)]
    runs.endings.clear()
    assert runs.run(StageSelection(resume=True)) == 0
    assert runs.started == [("2_longer", True), ("3_hard", False)]
    assert runs.run(StageSelection(resume=True)) == 0
    assert runs.started == []


def test_a_stage_with_a_checkpoint_is_resumed_without_logs_and_other_checkpoints(runs: Runs) -> None:
    runs.endings["3_hard"] = 130
    runs.run()
    begun = runs.configurations["3_hard"]
    shutil.rmtree(runs.runs / "staged" / "1_short" / "checkpoints")
    shutil.rmtree(runs.runs / "staged" / "2_longer" / "logs")
    runs.endings.clear()
    assert runs.run(StageSelection(resume=True)) == 0
    assert runs.started == [("3_hard", True)]
    assert runs.configurations["3_hard"] == begun
    shutil.rmtree(runs.runs / "staged" / "2_longer" / "checkpoints")
    assert runs.run(StageSelection(resume=True)) == 0
    assert runs.started == []


def test_a_resume_keeps_the_names_and_numbers_of_begun_stages(runs: Runs) -> None:
    runs.endings["2_longer"] = 1
    runs.run()
    record = runs.runs / "staged" / "stages.json"
    before = record.read_bytes()
    runs.config.write_text(CONFIG.replace("[[stages]]", '[[stages]]\nname = "warm"\n[[stages]]', 1))
    with pytest.raises(
        RunFolderError, match=r"1_short, 2_longer have begun, but .* has 1_warm, 2_short, 3_longer, 4_h"
    ):
        runs.run(StageSelection(resume=True))
    assert record.read_bytes() == before
    runs.endings.clear()
    runs.config.write_text(CONFIG.replace('name = "hard"', 'name = "harder"'))
    assert runs.run(StageSelection(resume=True)) == 0
    assert runs.started == [("2_longer", True), ("3_harder", False)]


@pytest.mark.parametrize(
    "change", ["stages.longer.optimizer=keep", "stages.longer.problem_order=restart", "stages.hard.problems=all"]
)
def test_changed_stage_keys_of_a_finished_stage_are_refused(runs: Runs, change: str) -> None:
    runs.run()
    assert "finished with another configuration" in runs.refuse(StageSelection(resume=True), change)


def test_a_finished_stage_with_another_configuration_is_refused(runs: Runs) -> None:
    runs.run()
    with pytest.raises(RunFolderError, match=r"2_longer: .*another configuration:\n  rl\.steps: 6 -> 7\n"):
        runs.run(StageSelection(resume=True), "stages.longer.rl.steps=7")


def test_from_stage_repeats_the_named_stage_and_all_later_stages(runs: Runs) -> None:
    runs.run()
    assert "2_longer: this stage exists; --resume continues" in runs.refuse(StageSelection(first="longer"))
    assert runs.run(StageSelection(first="longer", overwrite=True), "stages.longer.rl.steps=7") == 0
    assert runs.started == [("2_longer", False), ("3_hard", False)]
    assert runs.configurations["3_hard"].learner.resume_from.endswith("2_longer/checkpoints/step_000007")


def test_from_stage_needs_the_earlier_stages_to_be_finished(runs: Runs) -> None:
    assert "stage short before it is not finished" in runs.refuse(StageSelection(first="longer"))
    assert "--from-stage x: no such stage; known are: short, longer, hard" in runs.refuse(StageSelection(first="x"))


def test_a_new_run_does_not_replace_another(runs: Runs) -> None:
    runs.run()
    assert "1_short: this stage exists" in runs.refuse()
    assert runs.run(StageSelection(overwrite=True)) == 0
    assert [name for name, _ in runs.started] == ["1_short", "2_longer", "3_hard"]


def test_foreign_folders_are_kept(runs: Runs) -> None:
    (runs.runs / "staged").mkdir(parents=True)
    (runs.runs / "staged" / "notes.txt").write_text("mine")
    for selection in (StageSelection(), StageSelection(overwrite=True), StageSelection(resume=True)):
        assert "contains notes.txt" in runs.refuse(selection)
    (runs.runs / "staged" / "notes.txt").rename(runs.runs / "staged" / "config.toml")
    assert "a run without stages" in runs.refuse(StageSelection(overwrite=True))


def test_a_joining_node_counts_the_stages_that_the_head_runs(runs: Runs) -> None:
    stages = load_stages(runs.config, (f'runs_folder="{runs.runs}"',))
    assert count_stages_to_run(stages, NEW_RUN) == 3
    runs.endings["2_longer"] = 1
    runs.run()
    assert count_stages_to_run(stages, StageSelection(resume=True)) == 2
    assert count_stages_to_run(stages, StageSelection(overwrite=True)) == 3
    assert count_stages_to_run(stages, StageSelection(overwrite=True, first="hard")) == 1


def test_a_missing_run_cannot_be_resumed(runs: Runs) -> None:
    assert "there is no run to resume" in runs.refuse(StageSelection(resume=True))
