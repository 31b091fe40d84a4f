"""`asterism log story` on a recorded log: why a trajectory waited, for what, and for how long."""

from __future__ import annotations

import pytest

from actors.log_commands import story_lines
from analysis.event_logs.telling import Words
from bus.messages import EngineJoined, StartGroup
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Dialogue
from policies.record import ids_to_bytes
from tests.fakes import TOKENIZER, generated
from tests.recorded import Recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One engine has room for one of two; the other waits until that one has ended."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    recording = Recording(folder, response_tokens=60)
    recording.tell("head/arbiter", EngineJoined("generator-0", 64, 16, 0))
    recording.tell("rollout-0", StartGroup(0, "train", "q:1", "2", ids_to_bytes([65, 66]), 2, 7, 1.0, 5))
    (first,) = recording.turns
    recording.now += 2.0
    recording.tell("rollout-0", generated(first.trajectory_id, 0, "I give up", lease=first.lease))
    recording.close()
    return folder


def test_the_story_says_why_a_trajectory_waited_and_for_what(folder: RunFolder) -> None:
    story = story_lines(folder, 8, Words(TOKENIZER, Dialogue()))
    told = [line.split("[bold]")[1].replace("[/]", "") for line in story]
    assert told == [
        "StartGroup  group 0, q:1, truth '2', 2 siblings",
        "LeaseRequested  lease 1, for turn 0: it has 2 tokens and may get 60 more",
        "LeaseDeferred  it waits: no engine has room for it",
        "LeaseGranted  lease 1, after 2.750 s: up to 62 tokens on generator-0: the most KV tokens are free there",
    ]


def test_the_story_of_one_that_did_not_wait_says_so(folder: RunFolder) -> None:
    story = story_lines(folder, 7, Words(TOKENIZER, Dialogue()))
    assert any("LeaseGranted" in line and "lease 1, at once: up to 62 tokens on generator-0" in line for line in story)
    assert "it has ended with 12 tokens" in story[-2]
    assert "no_answer, reward 0" in story[-1]


def test_a_trajectory_that_no_log_knows_has_no_story(folder: RunFolder) -> None:
    with pytest.raises(UnusableInput, match="no log knows trajectory 99"):
        story_lines(folder, 99, Words(TOKENIZER, Dialogue()))
