"""`asterism log fork` and `asterism log roc` read the logs and checkpoints of a finished run."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asterism.actors.cli.log.fork_command import ForkOptions, fork_trajectory
from asterism.actors.replay.branch_runner import EndedTrajectory
from asterism.actors.replay.replay import redecide_all
from asterism.actors.runtime.wiring import build_deciders
from asterism.analysis.roc_refilter import read_judged_groups
from asterism.bus.addresses import HEAD
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import TrajectoryFinished, bytes_to_ids
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from tests.actors.cli.invoking import read_output, read_refusal
from tests.actors.runs.running import asterism_output, read_messages
from tests.batches import CompleteBatch, assemble_batches
from tests.edited_logs import editing_log

pytestmark = pytest.mark.slow


def answered(folder: RunFolder, version: int) -> TrajectoryFinished:
    """Return the first trajectory that ran a cell and answered in two turns of one policy version."""
    for message in read_messages(folder, "head", TrajectoryFinished):
        in_two_turns = message.ending == "answered" and message.turns == 2
        of_version = set(bytes_to_ids(message.record.versions)) == {-1, version}
        if in_two_turns and of_version and _ran_a_call(folder, message):
            return message
    raise AssertionError(f"no trajectory of version {version} ran a cell and answered")


def _ran_a_call(folder: RunFolder, message: TrajectoryFinished) -> bool:
    log = folder.events / "rollout-0.sqlite"
    return any(read_events(log, trajectory=message.trajectory_id, kinds=["CodeFinished"]))


def fork(
    folder: RunFolder, tmp_path: Path, trajectory: int, *flags: object, run: Callable[..., str] = read_output
) -> tuple[dict[str, Any], str]:
    file = tmp_path / "fork.json"
    printed = run("log", "fork", folder.path, trajectory, *flags, "--json", file)
    return json.loads(file.read_text()), printed


def refused(folder: RunFolder, trajectory: int, *flags: object, turn: int = 1) -> str:
    return read_refusal("log", "fork", folder.path, trajectory, "--turn", turn, *flags)


# ---------------------------------------------------------------- fork


@pytest.mark.parametrize("turn", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_branch_without_changes_is_identical_to_the_original(finished: RunFolder, tmp_path: Path, turn: int) -> None:
    original = answered(finished, 0)
    result, printed = fork(finished, tmp_path, original.trajectory_id, "--turn", turn, run=asterism_output)
    (branch,) = result["branches"]
    assert branch["beside_original"]["same"], printed
    assert branch["outcome"]["token_ids"] == bytes_to_ids(original.record.token_ids)
    assert branch["outcome"]["reward"] == result["original"]["reward"] == original.reward
    assert branch["beside_original"]["logprob_difference_max"] < 1e-4
    assert "is identical to the original" in printed


def test_branches_with_another_tool_result_diverge_after_the_result(finished: RunFolder, tmp_path: Path) -> None:
    original = answered(finished, 0)
    (tmp_path / "result.txt").write_text("31\n")
    flags = ("--tool-result", tmp_path / "result.txt")
    result, printed = fork(finished, tmp_path, original.trajectory_id, "--turn", 1, *flags, "-n", 4)
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
def test_another_seed_or_checkpoint_gives_other_branches(finished: RunFolder, tmp_path: Path) -> None:
    original = answered(finished, 0)
    where = (original.trajectory_id, "--turn", 0, "--seed", 5, "-n", 6)
    first, _ = fork(finished, tmp_path, *where)
    again, _ = fork(finished, tmp_path, *where)
    token_ids = [branch["outcome"]["token_ids"] for branch in first["branches"]]
    assert token_ids == [branch["outcome"]["token_ids"] for branch in again["branches"]]
    assert len({tuple(ids) for ids in token_ids}) > 1
    newest, _ = fork(finished, tmp_path, *where, "--checkpoint", finished.get_checkpoint_path(3))
    assert newest["checkpoint"] == str(finished.get_checkpoint_path(3))
    differences = [branch["beside_original"]["logprob_difference_max"] for branch in newest["branches"]]
    assert max(each for each in differences if each is not None) > 1e-4  # another policy generated these tokens


def test_invalid_fork_options_are_named(finished: RunFolder, tmp_path: Path) -> None:
    number, missing, encoded = answered(finished, 0).trajectory_id, tmp_path / "missing", tmp_path / "bytes"
    encoded.write_bytes(b"4\xff")
    assert "trajectory 99999" in refused(finished, 99999, turn=0)
    assert f"trajectory {number} has turns 0 to 1" in refused(finished, number, turn=2)
    before_any = refused(finished, number, "--tool-result", finished.config, turn=0)
    assert "turn 0 follows no tool call" in before_any
    for flag, value, error in (
        ("--tool-result", missing, f"{missing}: No such file"),
        ("--tool-result", encoded, f"{encoded}: is not UTF-8 text (byte 1)"),
        ("--checkpoint", missing, f"{missing}: no such folder"),
        ("--json", missing / "fork.json", f"the folder {missing} does not exist"),
        ("--json", tmp_path, f"--json {tmp_path}: is a folder; name a file"),
        ("--set", "dialogue.max_turns=9", "only engine.* and sandbox.* can"),
    ):
        assert error in refused(finished, number, flag, value)
    copy = copy_run(finished, tmp_path)
    shutil.rmtree(copy.events)
    assert "there is no event log" in refused(copy, number)


def test_an_error_for_a_missing_checkpoint_lists_the_existing_ones(finished: RunFolder) -> None:
    assert not finished.get_checkpoint_path(1).exists()  # the run keeps step 0 and the two newest steps
    error = refused(finished, answered(finished, 1).trajectory_id)
    assert "policy version 1, which generated turn 1" in error
    assert "step_000000, step_000002, step_000003" in error


def test_a_checkpoint_without_an_exported_model_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(finished, tmp_path)  # other tests read the original at the same time
    weights = shutil.ignore_patterns("model.safetensors")
    shutil.copytree(finished.get_checkpoint_path(0), copy.get_checkpoint_path(0), ignore=weights)
    error = refused(copy, answered(copy, 0).trajectory_id)
    assert "step_000000: has no exported model (learner.checkpoints.export_every)" in error


def test_a_checkpoint_of_another_vocabulary_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished.get_checkpoint_path(0), other, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    error = refused(finished, answered(finished, 0).trajectory_id, "--checkpoint", other)
    assert str(other / "tokenizer.json") in error
    assert "vocabulary" in error


def test_a_log_that_ends_within_a_turn_can_be_forked_with_a_checkpoint(finished: RunFolder, tmp_path: Path) -> None:
    original = answered(finished, 0)
    number = original.trajectory_id
    cut = copy_run(finished, tmp_path / "cut")
    with editing_log(cut.events / "rollout-0.sqlite") as log:
        turns = log.execute("SELECT seq FROM events WHERE trajectory = ? AND kind = 'TurnGenerated'", (number,))
        (_, (last,)) = turns.fetchall()
        log.execute("DELETE FROM events WHERE seq >= ?", (last,))
    (cut.events / "head.sqlite").unlink()
    assert f"trajectory {number} has no logged token of turn 1" in refused(cut, number)
    named, _ = fork(cut, tmp_path, number, "--turn", 1, "--checkpoint", finished.get_checkpoint_path(0))
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
def test_a_fork_is_as_deterministic_as_its_run(
    finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, determinism: str
) -> None:
    copy = copy_run(finished, tmp_path)
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
    )  # suppressed logs would stay off in later tests
    monkeypatch.setattr(
        "asterism.engine.inference.embedded_factory.EmbeddedEngine",
        lambda *parts, strict, **more: made.append(("engine", strict)),
    )
    number = answered(finished, 0).trajectory_id
    options = ForkOptions(number, 1, None, finished.get_checkpoint_path(0), None, 1, [], None)
    assert fork_trajectory(copy, options, Console(quiet=True)) == 0
    assert made == [("engine", determinism == "strict"), ("executor", determinism == "strict")]


def test_a_fork_of_a_run_with_a_rollout_policy_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(finished, tmp_path)
    copy.config.write_text(copy.config.read_text().replace('"independent"', '"examples.rollout_policies:TreeSearch"'))
    refusal = refused(copy, answered(finished, 0).trajectory_id, "--checkpoint", finished.get_checkpoint_path(0))
    assert (
        "rl.rollout_policy = examples.rollout_policies:TreeSearch: a trajectory may depend on its siblings" in refusal
    )


def test_a_log_whose_replay_has_other_tokens_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(finished, tmp_path)
    resolved = copy.config.read_text()
    changed = re.sub(r"result_characters = \d+", "result_characters = 1", resolved)
    assert changed != resolved
    copy.config.write_text(changed)
    number = answered(finished, 0).trajectory_id
    # `fork` checks the checkpoint before the replay, and the copy has none.
    error = refused(copy, number, "--checkpoint", finished.get_checkpoint_path(0))
    assert f"trajectory {number} replays differently" in error


# ---------------------------------------------------------------- roc


def read_batches(folder: RunFolder) -> list[CompleteBatch]:
    """Replay the head's whole log, and return the batches of the run."""
    deciders = build_deciders(HEAD, load_run(folder.config), folder)
    decided = redecide_all(folder.events / "head.sqlite", deciders, since=1)
    return assemble_batches(send.message for _, _, redecision in decided for send in redecision.sends)


def test_roc_keeps_the_trajectories_of_each_batch(finished: RunFolder) -> None:
    batches = read_batches(finished)
    steps = dict(read_judged_groups(load_run(finished.config), finished))
    assert sum(len(batch.samples) for batch in batches) > 0
    assert {step: sorted(each for group in groups for each in group.judged.kept) for step, groups in steps.items()} == {
        batch.step: [row.trajectory_id for row in batch.samples] for batch in batches
    }
