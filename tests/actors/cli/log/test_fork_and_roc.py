"""`asterism log fork` and `asterism log roc` read the logs and checkpoints of a finished run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asterism.actors.cli.log.fork_command import ForkOptions, fork_trajectory
from asterism.actors.replay.branch_runner import EndedTrajectory
from asterism.actors.replay.replay import redecide_all, replay_trajectory
from asterism.actors.runtime.wiring import build_deciders, build_rules
from asterism.analysis.roc_refilter import read_judged_groups
from asterism.bus.addresses import HEAD
from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import TrajectoryFinished, bytes_to_ids
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.model.tokenizer import load_tokenizer
from asterism.policies.rollout.rollout import Rollout
from asterism.tasks.math_python import MATH_PYTHON
from tests.actors.runs.running import asterism
from tests.batches import CompleteBatch, assemble_batches
from tests.edited_logs import editing_log

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(finished_run: tuple[RunFolder, str]) -> RunFolder:
    return finished_run[0]


def answered(folder: RunFolder, version: int) -> TrajectoryFinished:
    """Return the first trajectory that ran a cell and answered in two turns of one policy version."""
    for event, _ in read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"]):
        message = decode(event.frame).message
        assert isinstance(message, TrajectoryFinished)
        in_two_turns = message.ending == "answered" and message.turns == 2
        if (
            in_two_turns
            and set(bytes_to_ids(message.record.versions)) == {-1, version}
            and _ran_a_call(folder, message)
        ):
            return message
    raise AssertionError(f"no trajectory of version {version} ran a cell and answered")


def _ran_a_call(folder: RunFolder, message: TrajectoryFinished) -> bool:
    log = folder.events / "rollout-0.sqlite"
    return any(read_events(log, trajectory=message.trajectory_id, kinds=["CodeFinished"]))


def fork(folder: RunFolder, tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / "fork.json"
    done = asterism("log", "fork", str(folder.path), *arguments, "--json", str(file))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def refused(*arguments: str) -> str:
    done = asterism("log", *arguments)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ")
    return done.stderr


# ---------------------------------------------------------------- fork


@pytest.mark.parametrize("turn", [0, 1])
def test_a_branch_without_changes_is_identical_to_the_original(folder: RunFolder, tmp_path: Path, turn: int) -> None:
    original = answered(folder, 0)
    result, printed = fork(folder, tmp_path, str(original.trajectory_id), "--turn", str(turn))
    (branch,) = result["branches"]
    assert branch["beside_original"]["same"], printed
    assert branch["outcome"]["token_ids"] == bytes_to_ids(original.record.token_ids)
    assert branch["outcome"]["reward"] == result["original"]["reward"] == original.reward
    assert branch["beside_original"]["logprob_difference_max"] < 1e-4
    assert "is identical to the original" in printed


def test_branches_with_another_tool_result_diverge_after_the_result(folder: RunFolder, tmp_path: Path) -> None:
    original = answered(folder, 0)
    (tmp_path / "result.txt").write_text("31\n")
    flags = ("--tool-result", str(tmp_path / "result.txt"))
    result, printed = fork(folder, tmp_path, str(original.trajectory_id), "--turn", "1", *flags, "-n", "4")
    outcomes = [branch["outcome"] for branch in result["branches"]]
    assert len({outcome["seed"] for outcome in outcomes}) == 4
    assert result["tool_result"] == "31\n"
    for branch in result["branches"]:
        divergence = branch["beside_original"]["parting"]
        assert (divergence["within"], divergence["turn"]) == ("result", 1)
        assert "stdout:\n31\n</tool_response>" in branch["outcome"]["told"][1]["given"]
        assert branch["outcome"]["told"][0] == result["original"]["told"][0]
        assert branch["outcome"]["reward"] in (0.0, 1.0)
    assert "branch 3" in printed


@pytest.mark.nightly
def test_another_seed_or_checkpoint_gives_other_branches(folder: RunFolder, tmp_path: Path) -> None:
    original = answered(folder, 0)
    where = (str(original.trajectory_id), "--turn", "0", "--seed", "5", "-n", "6")
    first, _ = fork(folder, tmp_path, *where)
    again, _ = fork(folder, tmp_path, *where)
    token_ids = [branch["outcome"]["token_ids"] for branch in first["branches"]]
    assert token_ids == [branch["outcome"]["token_ids"] for branch in again["branches"]]
    assert len({tuple(ids) for ids in token_ids}) > 1
    newest, _ = fork(folder, tmp_path, *where, "--checkpoint", str(folder.get_checkpoint_path(3)))
    assert newest["checkpoint"] == str(folder.get_checkpoint_path(3))
    differences = [branch["beside_original"]["logprob_difference_max"] for branch in newest["branches"]]
    assert max(each for each in differences if each is not None) > 1e-4  # another policy generated these tokens


def test_invalid_fork_options_are_named(folder: RunFolder, tmp_path: Path) -> None:
    run, original = str(folder.path), answered(folder, 0)
    number = str(original.trajectory_id)
    assert "trajectory 99999" in refused("fork", run, "99999", "--turn", "0")
    assert f"trajectory {number} has turns 0 to 1" in refused("fork", run, number, "--turn", "2")
    missing = str(tmp_path / "missing")
    assert f"{missing}: No such file" in refused("fork", run, number, "--turn", "1", "--tool-result", missing)
    before_any = refused("fork", run, number, "--turn", "0", "--tool-result", str(folder.config))
    assert "turn 0 follows no tool call" in before_any
    (tmp_path / "bytes").write_bytes(b"4\xff")
    no_text = refused("fork", run, number, "--turn", "1", "--tool-result", str(tmp_path / "bytes"))
    assert f"{tmp_path / 'bytes'}: is not UTF-8 text (byte 1)" in no_text
    assert f"{missing}: no such folder" in refused("fork", run, number, "--turn", "1", "--checkpoint", missing)
    elsewhere = refused("fork", run, number, "--turn", "1", "--json", f"{missing}/fork.json")
    assert f"the folder {missing} does not exist" in elsewhere
    a_folder = refused("fork", run, number, "--turn", "1", "--json", str(tmp_path))
    assert f"--json {tmp_path}: is a folder; name a file" in a_folder
    other_rules = refused("fork", run, number, "--turn", "1", "--set", "dialogue.max_turns=9")
    assert "only engine.* and sandbox.* can" in other_rules
    shutil.rmtree(copy_run(folder, tmp_path).events)
    assert "there is no event log" in refused("fork", str(tmp_path), number, "--turn", "1")


def test_an_error_for_a_missing_checkpoint_lists_the_existing_ones(folder: RunFolder) -> None:
    assert not folder.get_checkpoint_path(1).exists()  # the run keeps the cold start's checkpoint and the two newest
    number = str(answered(folder, 1).trajectory_id)
    error = refused("fork", str(folder.path), number, "--turn", "1")
    assert "policy version 1, which generated turn 1" in error
    assert "step_000000, step_000002, step_000003" in error


def test_a_checkpoint_without_an_exported_model_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(folder, tmp_path)  # other tests read the original at the same time
    weights = shutil.ignore_patterns("model.safetensors")
    shutil.copytree(folder.get_checkpoint_path(0), copy.get_checkpoint_path(0), ignore=weights)
    error = refused("fork", str(copy.path), str(answered(copy, 0).trajectory_id), "--turn", "1")
    assert "step_000000: has no exported model (learner.checkpoints.export_every)" in error


def test_a_checkpoint_of_another_vocabulary_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder.get_checkpoint_path(0), other, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    number = str(answered(folder, 0).trajectory_id)
    error = refused("fork", str(folder.path), number, "--turn", "1", "--checkpoint", str(other))
    assert str(other / "tokenizer.json") in error
    assert "vocabulary" in error


def test_a_log_that_ends_within_a_turn_can_be_forked_with_a_checkpoint(folder: RunFolder, tmp_path: Path) -> None:
    original = answered(folder, 0)
    number = str(original.trajectory_id)
    cut = copy_run(folder, tmp_path / "cut")
    with editing_log(cut.events / "rollout-0.sqlite") as log:
        turns = log.execute("SELECT seq FROM events WHERE trajectory = ? AND kind = 'TurnGenerated'", (number,))
        (_, (last,)) = turns.fetchall()
        log.execute("DELETE FROM events WHERE seq >= ?", (last,))
    (cut.events / "head.sqlite").unlink()
    assert f"trajectory {number} has no logged token of turn 1" in refused("fork", str(cut.path), number, "--turn", "1")
    named, _ = fork(cut, tmp_path, number, "--turn", "1", "--checkpoint", str(folder.get_checkpoint_path(0)))
    (branch,) = named["branches"]
    assert named["original"]["ending"] == "not in the log: generating"
    assert branch["outcome"]["token_ids"] == bytes_to_ids(original.record.token_ids)
    assert branch["beside_original"]["parting"] is None
    assert branch["beside_original"]["common_tokens"] == len(named["original"]["token_ids"])


def copy_run(folder: RunFolder, path: Path) -> RunFolder:
    """Copy event logs, configuration and descriptions; model and data remain in the original folder."""
    shutil.copytree(folder.events, path / "events")
    shutil.copy(folder.task_descriptions, path)
    (path / "config.toml").write_text(folder.config.read_text().replace("$RUN", str(folder.path)))
    return RunFolder(path)


@pytest.mark.parametrize("determinism", ["fast", "strict"])
def test_a_fork_has_the_determinism_of_its_run(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, determinism: str
) -> None:
    copy = copy_run(folder, tmp_path)
    resolved = copy.config.read_text()
    assert 'determinism = "fast"' in resolved
    copy.config.write_text(resolved.replace('determinism = "fast"', f'determinism = "{determinism}"'))
    made: list[tuple[str, bool]] = []

    async def record_strictness(*parts: object, strict: bool, tasks: object) -> list[EndedTrajectory]:
        made.append(("executor", strict))
        return []

    monkeypatch.setattr("asterism.actors.cli.log.fork_command.continue_trajectories", record_strictness)
    monkeypatch.setattr(
        "asterism.actors.cli.log.fork_command.suppress_logs", lambda: None
    )  # a change of structlog would last
    monkeypatch.setattr(
        "asterism.engine.inference.embedded_factory.EmbeddedEngine",
        lambda *parts, strict, **more: made.append(("engine", strict)),
    )
    number = answered(folder, 0).trajectory_id
    options = ForkOptions(number, 1, None, folder.get_checkpoint_path(0), None, 1, [], None)
    assert fork_trajectory(copy, options, Console(quiet=True)) == 0
    assert made == [("engine", determinism == "strict"), ("executor", determinism == "strict")]


def test_a_log_that_replays_to_other_tokens_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(folder, tmp_path)
    resolved = copy.config.read_text()
    changed = re.sub(r"result_characters = \d+", "result_characters = 1", resolved)
    assert changed != resolved
    copy.config.write_text(changed)
    number = str(answered(folder, 0).trajectory_id)
    checkpoint = str(folder.get_checkpoint_path(0))  # the copy has no checkpoint, which is checked before the replay
    error = refused("fork", str(tmp_path), number, "--turn", "1", "--checkpoint", checkpoint)
    assert f"trajectory {number} replays differently" in error


def test_a_replayed_trajectory_has_the_end_that_the_head_logged(folder: RunFolder) -> None:
    run = load_run(folder.config)
    tokenizer = load_tokenizer(folder.expand_path(run.model.checkpoint))
    for original in (answered(folder, 0), answered(folder, 1)):
        rollout = Rollout(build_rules(run, {"": MATH_PYTHON}, tokenizer))
        assert replay_trajectory(folder.events / "rollout-0.sqlite", rollout, original.trajectory_id).end == original


# ---------------------------------------------------------------- roc


def read_batches(folder: RunFolder) -> list[CompleteBatch]:
    """Return the batches of the run, from a replay of the whole head."""
    deciders = build_deciders(HEAD, load_run(folder.config), folder)
    decided = redecide_all(folder.events / "head.sqlite", deciders, since=1)
    return assemble_batches(send.message for _, _, redecision in decided for send in redecision.sends)


def test_every_step_keeps_the_trajectories_of_its_batch(folder: RunFolder) -> None:
    batches = read_batches(folder)
    steps = dict(read_judged_groups(load_run(folder.config), folder))
    assert sum(len(batch.samples) for batch in batches) > 0
    assert {step: sorted(each for group in groups for each in group.judged.kept) for step, groups in steps.items()} == {
        batch.step: [row.trajectory_id for row in batch.samples] for batch in batches
    }
