"""A trajectory is replayed from the log of its rollout process, with the logged or another tool result."""

from pathlib import Path

import pytest

from asterism.actors.replay.replay import ReplayedTrajectory, ResultOverride, replay_trajectory
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import decode
from asterism.bus.messages import CodeTimedOut, Output, RunStarted, TrajectoryEnd, TrajectoryFinished, bytes_to_ids
from asterism.bus.messages.run import BufferCursor
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.policies.rollout.rollout import Rollout
from tests.fakes import PROMPT, TOKENIZER, rules
from tests.recorded import RULES, THREE_TURNS, TID, Recording, record_trajectory, replay_recorded, write_world_logs
from tests.simulation.test_faults import live


def read_context(replayed: ReplayedTrajectory, turn: int) -> str:
    """Return the model's context at the start of the turn."""
    return TOKENIZER.decode(bytes_to_ids(replayed.turn_starts[turn].record.token_ids))


def test_a_replay_has_the_state_at_every_turn_start_and_the_end() -> None:
    whole = replay_recorded()
    assert [start.turn for start in whole.turn_starts] == [0, 1, 2]
    assert [start.calls for start in whole.turn_starts] == [0, 1, 3]
    assert whole.turn_starts[0].record.token_ids == PROMPT
    assert isinstance(whole.end, TrajectoryFinished)
    assert (whole.end.reward, whole.end.turns, whole.end.record.token_ids) == (1.0, 3, whole.final.record.token_ids)


def test_an_incomplete_log_leaves_the_trajectory_without_an_end() -> None:
    cut = replay_recorded(THREE_TURNS[:1])
    assert cut.end is None
    assert (cut.final.phase, len(cut.turn_starts)) == ("generating", 2)


def test_another_result_changes_the_context_after_it() -> None:
    before = replay_recorded()
    after = replay_recorded(tool_result=ResultOverride(before.last_results[1], "a hundred\n"))
    assert read_context(after, 1) == read_context(before, 1).replace("seven", "a hundred")
    assert after.turn_starts[0] == before.turn_starts[0]


def test_only_the_result_of_the_last_call_is_replaced() -> None:
    changed = replay_recorded(tool_result=ResultOverride(replay_recorded().last_results[2], "ninety"))
    assert "ninety" in read_context(changed, 2) and "nine\n" not in read_context(changed, 2)
    assert "eight" in read_context(changed, 2)


def test_a_replaced_failure_is_not_counted() -> None:
    timed_out = CodeTimedOut(Output(), 4.0)
    failed = replay_recorded(first_outcome=timed_out)
    assert failed.turn_starts[1].calls_failed == 1
    now_works = ResultOverride(failed.last_results[1], "now it works")
    works = replay_recorded(first_outcome=timed_out, tool_result=now_works)
    assert works.turn_starts[1].calls_failed == 0


def test_a_turn_after_a_malformed_call_follows_no_result() -> None:
    assert replay_recorded(["<tool_call>{</tool_call>"]).last_results == {}


def test_a_trajectory_is_replayed_from_the_later_of_two_launches(tmp_path: Path) -> None:
    recording = Recording(RunFolder(tmp_path / "run"), max_calls_per_turn=2)
    record_trajectory(recording)
    record_trajectory(recording, THREE_TURNS[:1])
    recording.tell(ROLLOUT, RunStarted(0, BufferCursor()), ROLLOUT)  # a third launch without the trajectory
    recording.close()
    log = tmp_path / "run" / "events" / "rollout-0.sqlite"
    again = replay_trajectory(log, Rollout({"": RULES}), TID)
    assert (again.end, len(again.turn_starts)) == (None, 2)
    with pytest.raises(UnusableInput, match="no trajectory 99"):
        replay_trajectory(log, Rollout({"": RULES}), 99)
    with pytest.raises(UnusableInput, match=r"trajectory 8 replays differently from event \d+ on"):
        replay_trajectory(log, Rollout({"": rules(result_characters=1)}), TID)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])  # odd seeds kill executors
def test_replayed_trajectories_end_as_in_their_run_with_faults(seed: int, tmp_path: Path) -> None:
    world = live(seed)
    log = write_world_logs(world, tmp_path).events / "rollout-0.sqlite"
    logged = [event for event in world.logs[HEAD].events if not world.logs[HEAD].decisions[event.seq].is_refused]
    ends = [decode(event.frame).message for event in logged if event.actor == "buffer"]
    for end in [end for end in ends if isinstance(end, TrajectoryEnd)][::6]:
        (rollout,) = world.deciders()[ROLLOUT].values()
        assert isinstance(rollout, Rollout)
        assert replay_trajectory(log, rollout, end.trajectory_id).end == end
