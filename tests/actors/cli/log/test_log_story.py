"""The output of `asterism log story` on a recorded log is compared with golden text."""

import re
from pathlib import Path

import pytest

from asterism.actors.cli.log.show_command import format_story
from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import EngineJoined, TrajectoryFinished, bytes_to_ids, ids_to_bytes
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.dialogue import DialogueConfig
from tests.actors.cli.golden_text import assert_matches_golden
from tests.fakes import CALL, TOKENIZER, generated, start_group, text_context
from tests.recorded import Recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Record a run whose engine has room for one trajectory, so that the second trajectory waits for the first."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    recording = Recording(folder, response_tokens=60)
    recording.tell("head/arbiter", EngineJoined("generator-0", 64, 16, 0))
    recording.tell("rollout-0", start_group(2, prompt_ids=ids_to_bytes([65, 66])))
    (first,) = recording.turns
    recording.now += 2.0
    recording.tell("rollout-0", generated(first.trajectory_id, 0, "I give up", lease=first.lease))
    recording.close()
    return folder


@pytest.mark.parametrize("trajectory", [7, 8])
def test_the_story_shows_waits_with_reason_and_duration(folder: RunFolder, trajectory: int) -> None:
    story = format_story(folder, trajectory, text_context())
    assert_matches_golden(f"story_{trajectory}", "\n".join(story))


def test_the_story_shows_every_text_that_the_model_read(tmp_path: Path) -> None:
    """A turn has two calls: one call is not JSON, and the other call runs for 0.01 s after a wait of 1 s."""
    folder = RunFolder(tmp_path / "run")
    recording = Recording(folder, max_calls_per_turn=2)
    recording.begin()
    recording.tell("rollout-0", start_group())
    (turn,) = recording.turns
    recording.turns.clear()
    recording.tell("rollout-0", generated(7, 0, f"<tool_call>{{</tool_call>{CALL}", lease=turn.lease))
    recording.now += 1.01 - 2 * 0.25  # LeasePaused and CodeFinished take a tick each
    recording.work({}, "the sum is 4")
    recording.close()
    rules = DialogueConfig(max_calls_per_turn=2, result_characters=200)
    story = "\n".join(format_story(folder, 7, text_context(rules)))
    assert_matches_golden("story_malformed_call", story)
    record = next(
        decode(event.frame).message
        for event, _ in read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"])
    )
    assert isinstance(record, TrajectoryFinished)
    dialogue = TOKENIZER.decode(bytes_to_ids(record.record.token_ids))
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", dialogue, re.DOTALL)
    assert len(results) == 2
    assert all(text in story for text in ("question", *results))


def test_an_unknown_trajectory_is_refused(folder: RunFolder) -> None:
    with pytest.raises(UnusableInput, match="no event of trajectory 99"):
        format_story(folder, 99, text_context())
