"""The output of `asterism log story` on a recorded log, compared with golden text."""

import pytest

from actors.cli.log.show_command import format_story
from analysis.event_logs.describe import TextContext
from bus.messages import EngineJoined, StartGroup, ids_to_bytes
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import DialogueConfig
from tests.actors.cli.golden_text import assert_matches_golden
from tests.fakes import TOKENIZER, generated
from tests.recorded import Recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One engine has room for one of two trajectories; the second one waits for the first."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    recording = Recording(folder, response_tokens=60)
    recording.tell("head/arbiter", EngineJoined("generator-0", 64, 16, 0))
    recording.tell("rollout-0", StartGroup(0, "train", "q:1", "2", ids_to_bytes([65, 66]), 2, 7, 1.0, 5))
    (first,) = recording.turns
    recording.now += 2.0
    recording.tell("rollout-0", generated(first.trajectory_id, 0, "I give up", lease=first.lease))
    recording.close()
    return folder


@pytest.mark.parametrize("trajectory", [7, 8])
def test_the_story_shows_waits_with_reason_and_duration(folder: RunFolder, trajectory: int) -> None:
    story = format_story(folder, trajectory, TextContext(TOKENIZER, DialogueConfig()))
    assert_matches_golden(f"story_{trajectory}", "\n".join(story))


def test_an_unknown_trajectory_is_refused(folder: RunFolder) -> None:
    with pytest.raises(UnusableInput, match="no event of trajectory 99"):
        format_story(folder, 99, TextContext(TOKENIZER, DialogueConfig()))
