"""`asterism log fork` and `asterism log roc` on a run that has ended: from its logs and checkpoints alone."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actors.fork_command import Options, fork_trajectory
from actors.forking import Ended
from actors.logged_groups import steps_of
from actors.logged_history import end_heard, history_of
from actors.wiring import HEAD, deciders_of, rules
from bus.codec import decode
from bus.event_reading import read_events
from bus.messages import BatchReady, ProtocolError, TrajectoryFinished
from configs.load import load_resolved
from configs.run_folder import RunFolder
from engine.tokenizer import load_tokenizer
from policies.history import course_of
from policies.record import bytes_to_ids
from policies.refiltering import rows_by
from tests.actors.running import asterism

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(finished_run: tuple[RunFolder, str]) -> RunFolder:
    return finished_run[0]


def answered(folder: RunFolder, version: int) -> TrajectoryFinished:
    """The first trajectory that ran a cell, read its result and answered, all by one policy."""
    for event, _ in read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"]):
        message = decode(event.frame).message
        assert isinstance(message, TrajectoryFinished)
        in_two_turns = message.ending == "answered" and message.turns == 2
        if in_two_turns and set(bytes_to_ids(message.versions)) == {-1, version} and _ran_a_call(folder, message):
            return message
    raise AssertionError(f"none of version {version} ran a cell and answered")


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
def test_without_any_change_a_branch_is_the_original_again(folder: RunFolder, tmp_path: Path, turn: int) -> None:
    original = answered(folder, 0)
    told, printed = fork(folder, tmp_path, str(original.trajectory_id), "--turn", str(turn))
    (branch,) = told["branches"]
    assert branch["beside_original"]["same"], printed
    assert branch["outcome"]["token_ids"] == bytes_to_ids(original.token_ids)
    assert branch["outcome"]["reward"] == told["original"]["reward"] == original.reward
    assert branch["beside_original"]["logprob_difference_max"] < 1e-4
    assert "is the original again" in printed


def test_with_another_tool_result_all_branches_part_there(folder: RunFolder, tmp_path: Path) -> None:
    original = answered(folder, 0)
    (tmp_path / "result.txt").write_text("31\n")
    result = ("--tool-result", str(tmp_path / "result.txt"))
    told, printed = fork(folder, tmp_path, str(original.trajectory_id), "--turn", "1", *result, "-n", "4")
    outcomes = [branch["outcome"] for branch in told["branches"]]
    assert len({outcome["seed"] for outcome in outcomes}) == 4
    assert told["tool_result"] == "31\n"
    for branch in told["branches"]:
        parting = branch["beside_original"]["parting"]
        assert (parting["within"], parting["turn"]) == ("result", 1)
        assert "stdout:\n31\n</tool_response>" in branch["outcome"]["told"][1]["given"]
        assert branch["outcome"]["told"][0] == told["original"]["told"][0]
        assert branch["outcome"]["reward"] in (0.0, 1.0)
    assert "branch 3" in printed


def test_another_seed_and_another_policy_give_other_branches(folder: RunFolder, tmp_path: Path) -> None:
    original = answered(folder, 0)
    where = (str(original.trajectory_id), "--turn", "0", "--seed", "5", "-n", "6")
    first, _ = fork(folder, tmp_path, *where)
    again, _ = fork(folder, tmp_path, *where)
    said = [branch["outcome"]["token_ids"] for branch in first["branches"]]
    assert said == [branch["outcome"]["token_ids"] for branch in again["branches"]]
    assert len({tuple(ids) for ids in said}) > 1
    newest, _ = fork(folder, tmp_path, *where, "--checkpoint", str(folder.checkpoint(3)))
    assert newest["checkpoint"] == str(folder.checkpoint(3))
    strayed = [branch["beside_original"]["logprob_difference_max"] for branch in newest["branches"]]
    assert max(each for each in strayed if each is not None) > 1e-4  # they are another policy's


def test_what_cannot_be_forked_is_refused_by_its_name(folder: RunFolder, tmp_path: Path) -> None:
    run, original = str(folder.path), answered(folder, 0)
    number = str(original.trajectory_id)
    assert "no log knows trajectory 99999" in refused("fork", run, "99999", "--turn", "0")
    assert f"trajectory {number} began turns 0 to 1" in refused("fork", run, number, "--turn", "2")
    missing = str(tmp_path / "missing")
    assert f"{missing}: No such file" in refused("fork", run, number, "--turn", "1", "--tool-result", missing)
    before_any = refused("fork", run, number, "--turn", "0", "--tool-result", str(folder.config))
    assert "no tool speaks before turn 0" in before_any
    (tmp_path / "bytes").write_bytes(b"4\xff")
    no_text = refused("fork", run, number, "--turn", "1", "--tool-result", str(tmp_path / "bytes"))
    assert f"{tmp_path / 'bytes'}: is not UTF-8 text (byte 1)" in no_text
    assert f"{missing}: there is no such folder" in refused("fork", run, number, "--turn", "1", "--checkpoint", missing)
    elsewhere = refused("fork", run, number, "--turn", "1", "--json", f"{missing}/fork.json")
    assert f"there is no folder {missing}" in elsewhere
    a_folder = refused("fork", run, number, "--turn", "1", "--json", str(tmp_path))
    assert f"--json {tmp_path}: Is a directory" in a_folder
    other_rules = refused("fork", run, number, "--turn", "1", "--set", "dialogue.max_turns=9")
    assert "only engine.* and sandbox.* can be set here" in other_rules
    (tmp_path / "config.toml").write_text(folder.config.read_text().replace("$RUN", run))
    assert "there is no event log" in refused("fork", str(tmp_path), number, "--turn", "1")


def test_where_the_policy_is_not_kept_those_that_are_get_named(folder: RunFolder) -> None:
    assert not folder.checkpoint(1).exists()  # the cold start's and the two newest are
    number = str(answered(folder, 1).trajectory_id)
    told = refused("fork", str(folder.path), number, "--turn", "1")
    assert "policy version 1, which generated turn 1" in told
    assert "step_000000, step_000002, step_000003" in told


def test_a_checkpoint_of_another_vocabulary_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder.checkpoint(0), other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    number = str(answered(folder, 0).trajectory_id)
    told = refused("fork", str(folder.path), number, "--turn", "1", "--checkpoint", str(other))
    assert f"{other / 'tokenizer.json'}: another vocabulary than" in told


def test_a_log_that_ends_within_a_turn_is_gone_on_with_by_a_policy_that_is_named(
    folder: RunFolder, tmp_path: Path
) -> None:
    original = answered(folder, 0)
    number = str(original.trajectory_id)
    cut = copy_of(folder, tmp_path / "cut")
    with contextlib.closing(sqlite3.connect(cut.events / "rollout-0.sqlite")) as log, log:
        turns = log.execute("SELECT seq FROM events WHERE trajectory = ? AND kind = 'TurnGenerated'", (number,))
        (_, (last,)) = turns.fetchall()
        log.execute("DELETE FROM events WHERE seq >= ?", (last,))
    (cut.events / "head.sqlite").unlink()
    told = refused("fork", str(cut.path), number, "--turn", "1")
    assert f"no token of turn 1 of trajectory {number} is logged" in told
    named, _ = fork(cut, tmp_path, number, "--turn", "1", "--checkpoint", str(folder.checkpoint(0)))
    (branch,) = named["branches"]
    assert named["original"]["ending"] == "none in the log: generating"
    assert branch["outcome"]["token_ids"] == bytes_to_ids(original.token_ids)
    assert branch["beside_original"]["parting"] is None
    assert branch["beside_original"]["common_tokens"] == len(named["original"]["token_ids"])


def copy_of(folder: RunFolder, path: Path) -> RunFolder:
    """Its event logs and configuration; model and data stay where they are."""
    shutil.copytree(folder.events, path / "events")
    (path / "config.toml").write_text(folder.config.read_text().replace("$RUN", str(folder.path)))
    return RunFolder(path)


@pytest.mark.parametrize("determinism", ["fast", "strict"])
def test_a_fork_is_as_strict_as_its_run(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, determinism: str
) -> None:
    copy = copy_of(folder, tmp_path)
    resolved = copy.config.read_text()
    assert 'determinism = "fast"' in resolved
    copy.config.write_text(resolved.replace('determinism = "fast"', f'determinism = "{determinism}"'))
    made: list[tuple[str, bool]] = []

    async def not_gone_on(*parts: object, strict: bool) -> list[Ended]:
        made.append(("executor", strict))
        return []

    monkeypatch.setattr("actors.fork_command.go_on", not_gone_on)
    monkeypatch.setattr("actors.fork_command.quiet", lambda: None)  # of structlog, for good
    monkeypatch.setattr(
        "actors.embedded_engine.EmbeddedEngine", lambda *parts, strict, **more: made.append(("engine", strict))
    )
    number = answered(folder, 0).trajectory_id
    options = Options(number, 1, None, folder.checkpoint(0), None, 1, [], None)
    assert fork_trajectory(copy, options, Console(quiet=True)) == 0
    assert made == [("engine", determinism == "strict"), ("executor", determinism == "strict")]


def test_a_log_that_comes_to_other_tokens_than_the_run_did_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path)
    resolved = copy.config.read_text()
    changed = re.sub(r"result_characters = \d+", "result_characters = 1", resolved)
    assert changed != resolved
    copy.config.write_text(changed)
    number = str(answered(folder, 0).trajectory_id)
    assert f"trajectory {number} comes to other tokens now" in refused("fork", str(tmp_path), number, "--turn", "1")


def test_every_course_ends_as_the_head_heard_it(folder: RunFolder) -> None:
    run = load_resolved(folder.config)
    tokenizer = load_tokenizer(folder.expand(run.model.checkpoint))
    for event, _ in read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"]):
        message = decode(event.frame).message
        assert isinstance(message, TrajectoryFinished)
        history = history_of(folder, message.trajectory_id)
        assert course_of(rules(run, tokenizer), tokenizer, history).end == end_heard(folder, history) == message


# ---------------------------------------------------------------- roc


def trained_on(folder: RunFolder) -> list[BatchReady]:
    """By a replay of the whole head, with the run's own problems."""
    deciders = deciders_of(HEAD, load_resolved(folder.config), folder)
    batches: list[BatchReady] = []
    for event, _ in read_events(folder.events / "head.sqlite"):
        try:
            effects = deciders[event.actor].decide(event.time, decode(event.frame).message)
        except ProtocolError:
            continue
        batches += [effect.message for effect in effects if isinstance(effect.message, BatchReady)]
    return batches


def test_the_runs_own_settings_give_the_rows_that_it_trained_on(folder: RunFolder) -> None:
    run = load_resolved(folder.config)
    steps = list(steps_of(run, folder))
    assert [step.batch for step in steps] == trained_on(folder)
    assert sum(len(step.batch.rows) for step in steps) > 0
    for step in steps:
        by_group = {group.group_id: rows_by(group, run) for group in step.groups}
        assert tuple(row for group_id in sorted(by_group) for row in by_group[group_id]) == step.batch.rows


def roc(folder: RunFolder, tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / "roc.json"
    done = asterism("log", "roc", str(folder.path), *arguments, "--json", str(file))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def test_filtered_by_its_own_settings_nothing_moves(folder: RunFolder, tmp_path: Path) -> None:
    told, printed = roc(folder, tmp_path)
    assert [step["step"] for step in told["steps"]] == [1, 2, 3]
    assert told["all_steps"]["run"] == told["all_steps"]["other"]
    assert told["all_steps"]["both"] == sum(len(batch.rows) for batch in trained_on(folder))
    assert told["all_steps"]["advantage_change_mean"] == 0.0
    assert "its own settings" in printed


def test_filtered_by_others_it_is_told_who_would_have_been_kept(folder: RunFolder, tmp_path: Path) -> None:
    told, _ = roc(folder, tmp_path, "--set", "roc.enabled=false")
    whole = told["all_steps"]
    assert whole["other"]["trajectories"] == 2 * whole["run"]["trajectories"] > whole["both"] > 0
    assert whole["advantage_change_mean"] > 0
    told, printed = roc(folder, tmp_path, "--set", "roc.negatives=first", "--step", "2")
    (step,) = told["steps"]
    come = [
        each["trajectory_id"]
        for each in step["trajectories"]
        if each["advantage"] is None and each["other_advantage"] is not None
    ]
    assert step["difference"]["other"]["trajectories"] == step["difference"]["run"]["trajectories"]
    assert come
    assert all(str(trajectory_id) in printed.partition("group ")[2] for trajectory_id in come)


def test_what_cannot_be_filtered_is_refused_by_its_name(folder: RunFolder) -> None:
    run = str(folder.path)
    assert "only roc.* can be set here" in refused("roc", run, "--set", "rl.prompts=3")
    assert "roc.penalty" in refused("roc", run, "--set", "roc.penalty=both")
    assert "has steps 1 to 3" in refused("roc", run, "--step", "4")
    assert "expected a step's number, or all" in refused("roc", run, "--step", "first")
