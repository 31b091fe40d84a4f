"""Tasks have failing code: every trajectory ends once, failures have a cause, and no failure becomes a reward.

The model is untrained. Digits are additional stop tokens, so that turns of dialogues end and reach `step`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from asterism.bus.messages import StartGroup, TrajectoryFailed, TrajectoryFinished
from asterism.configs.run_folder import RunFolder
from tests.actors.cli.invoking import read_output
from tests.actors.runs.running import asterism_output, metrics, read_conserved_summary, read_log_entries, read_messages

pytestmark = pytest.mark.slow

CODE = '''
import os
from pathlib import Path

from asterism.tasks.contract import Fault

FOLDER = Path(__file__).parent

def die_once(name):
    """End the process at the first call of all processes."""
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return
    os._exit(9)

class World:
    def reset(self, kind, **columns):
        if kind == "no reset":
            raise ValueError("no such world")
        if kind == "no column":
            return columns["absent"]
        return "a room"

    def look(self) -> str:
        """Look."""
        return "a door"

    def get_reward(self):
        return 0.5 + int.from_bytes(os.urandom(1), "big") / 512

class User:
    def init(self, row):
        self.kind = row["kind"]
        return "Good day."

    def step(self, message):
        if self.kind == "fault":
            raise Fault("the database is down")
        if self.kind == "raise":
            raise ValueError("boom")
        return {"messages": "And?", "rewards": {"turns": 0.5 + int.from_bytes(os.urandom(1), "big") / 512}}

class Mortal(User):
    def step(self, message):
        die_once("mortal")
        return super().step(message)

class Replayable(User):
    replayable = True

    def step(self, message):
        die_once("replayable")
        return {"messages": "And?", "rewards": {"turns": 0.5 + int.from_bytes(os.urandom(1), "big") / 512}}

def score_some(completions, kind):
    if kind[0] == "unscored":
        raise ValueError("no opinion")
    return [0.5]
'''
CONFIG = """
name = "demo"
runs_folder = "."

[prepare]
import = "asterism.tasks.tiny.prepare:TinyDemo"

[prepare.parameters]
num_train_questions = 16
num_test_questions = 16
num_sft_dialogues = 200

[dialogue]
tools = []
prompt_tokens = 64
response_tokens = 160
max_turns = 3
prefill = ""
stop_tokens = ["<|im_end|>", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]

[rl]
steps = 1
prompts = {prompts}
rollouts = 4
max_refill_groups = 0

[learner]
threads = 1

[log]
curves = false

[evaluation]
questions = 0

[sandbox]
backend = "process"
"""
KINDS = {
    "world": ("fine", "fine", "no reset", "no column"),
    "talk": ("fine", "fault", "raise", "unscored"),
    "mortal": ("fine",) * 4,
    "replayable": ("fine",) * 4,
}
ROLLOUTS = 4


def write_run(folder: Path) -> Path:
    """Write the configuration of a run with the tasks of KINDS, each with four rows."""
    (folder / "code.py").write_text(CODE)
    classes = {"world": "World", "talk": "User", "mortal": "Mortal", "replayable": "Replayable"}
    tables = [CONFIG.format(prompts=4 * len(KINDS))]
    for name, kinds in KINDS.items():
        rows = [{"question": f"{name} {number}? ", "kind": kind} for number, kind in enumerate(kinds)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tables.append(f'[[tasks]]\nname = "{name}"\nimport = "code.py:{classes[name]}"\ndata = "{name}.jsonl"')
        if name == "talk":
            tables.append('[tasks.reward.functions]\nf = "code.py:score_some"')
    path = folder / "run.toml"
    path.write_text("\n".join(tables))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Run all tasks of KINDS, with one group per row."""
    runs = tmp_path_factory.mktemp("runs")
    assert "identical" in asterism_output("run", write_run(runs), "--set", f"runs_folder={runs}")
    return RunFolder(runs / "demo")


def read_ends(folder: RunFolder) -> Iterator[tuple[str, str, TrajectoryFinished | TrajectoryFailed]]:
    """Yield task, kind of the row, and end of each trajectory."""
    groups = {
        group.group_id: (group.task, msgspec.json.decode(group.row)["kind"])
        for group in read_messages(folder, "rollout-0", StartGroup)
    }
    for end in read_messages(folder, "head", TrajectoryFinished, TrajectoryFailed):
        yield *groups[end.group_id], end


def count_ends(folder: RunFolder, task: str) -> Counter[tuple[str, str]]:
    """Count the ends of trajectories by kind of the row and cause of the failure; the cause is "" with a reward."""
    return Counter(
        (kind, end.cause if isinstance(end, TrajectoryFailed) else "")
        for name, kind, end in read_ends(folder)
        if name == task
    )


def test_every_started_trajectory_ends_once_and_failures_are_counted_by_cause(folder: RunFolder) -> None:
    summary = read_conserved_summary(folder)
    ends = list(read_ends(folder))
    assert len(ends) == len({end.trajectory_id for _, _, end in ends}) == 4 * 4 * ROLLOUTS
    failed = Counter(end.cause.partition(":")[0] for _, _, end in ends if isinstance(end, TrajectoryFailed))
    assert summary["trajectories_started"] == len(ends)
    assert summary["trajectories_failed"] == failed.total()
    (step,) = metrics(folder, "step")
    assert {key: value for key, value in step.items() if key.startswith("failed: ")} == {
        f"failed: {part}": float(count) for part, count in failed.items()
    }
    assert failed.keys() == {"environment", "reward"}
    assert step["trajectories"] + step["trajectories_failed"] == len(ends)


def test_no_failure_becomes_a_reward(folder: RunFolder) -> None:
    for task, kind, end in read_ends(folder):
        if isinstance(end, TrajectoryFinished):
            assert kind == "fine", (task, kind)
            assert end.reward >= 0.5 or not end.calls
            assert end.reward == pytest.approx(sum(end.components.values()))


def test_a_failed_reset_fails_the_trajectories_of_its_row(folder: RunFolder) -> None:
    assert count_ends(folder, "world") == {
        ("fine", ""): 2 * ROLLOUTS,
        ("no reset", "environment: reset raised ValueError: no such world"): ROLLOUTS,
        ("no column", "environment: reset raised KeyError: 'absent'"): ROLLOUTS,
    }


def test_a_failed_step_or_reward_fails_the_trajectories_of_its_row(folder: RunFolder) -> None:
    assert count_ends(folder, "talk") == {
        ("fine", ""): ROLLOUTS,
        ("fault", "environment: the database is down"): ROLLOUTS,
        ("raise", "environment: step raised ValueError: boom"): ROLLOUTS,
        ("unscored", "reward: f raised ValueError: no opinion"): ROLLOUTS,
    }


def test_a_host_that_dies_fails_only_its_live_instances(folder: RunFolder) -> None:
    ends = count_ends(folder, "mortal")
    causes = {cause for _, cause in ends if cause}
    assert causes == {"environment: the process that had the instance died"}
    assert ends.total() == 4 * ROLLOUTS
    assert [entry["exit_code"] for entry in read_log_entries(folder, "task_host.died", "executor-0")] == [9, 9]


def test_a_host_that_dies_loses_no_trajectory_of_a_replayable_task(folder: RunFolder) -> None:
    assert count_ends(folder, "replayable") == {("fine", ""): 4 * ROLLOUTS}
    finished = [end for task, _, end in read_ends(folder) if task == "replayable"]
    assert any(isinstance(end, TrajectoryFinished) and end.calls for end in finished)


def test_the_event_logs_of_failures_replay_identically(folder: RunFolder) -> None:
    assert "identical" in read_output("log", "replay", folder.path, "--verify")
