"""`asterism log story` on a recorded log: why a trajectory waited, for what, and for how long."""

from __future__ import annotations

import pytest

from actors.decider_loop import subject_of
from actors.log_commands import story_lines
from bus.codec import encode
from bus.event_log import EventLog
from bus.messages import AnyMessage, EngineJoined, Envelope, StartGroup, TurnRequested
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Dialogue
from policies.arbiter import Arbiter
from policies.decider import Decider
from policies.record import ids_to_bytes
from policies.rollout import Rollout
from tests.fakes import TOKENIZER, generated, rules


class Recording:
    """A rollout process and an arbiter that write down what they receive, as a run's processes do."""

    def __init__(self, folder: RunFolder) -> None:
        folder.events.mkdir(parents=True)
        self._logs = {name: EventLog(folder.events / f"{name}.sqlite") for name in ("head", "rollout-0")}
        self._deciders: dict[str, Decider] = {
            "head/arbiter": Arbiter("kv", 60),
            "rollout-0": Rollout(rules(response_tokens=60), TOKENIZER),
        }
        self.now = 100.0
        self.turns: list[TurnRequested] = []

    def tell(self, to: str, message: AnyMessage) -> None:
        self.now += 0.25
        process, _, actor = to.partition("/")
        frame = encode(Envelope("x", to, message))
        self._logs[process].append(self.now, actor or process, "x", type(message).__name__, subject_of(message), frame)
        for effect in self._deciders[to].decide(self.now, message):
            if isinstance(effect.message, TurnRequested):
                self.turns.append(effect.message)
            elif effect.to in self._deciders:
                self.tell(effect.to, effect.message)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One engine has room for one of two; the other waits until that one has ended."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    recording = Recording(folder)
    recording.tell("head/arbiter", EngineJoined("generator-0", 64, 16, 0))
    recording.tell("rollout-0", StartGroup(0, "train", "q:1", "2", ids_to_bytes([65, 66]), 2, 7, 1.0, 5))
    (first,) = recording.turns
    recording.now += 2.0
    recording.tell("rollout-0", generated(first.trajectory_id, 0, "I give up", lease=first.lease))
    recording.close()
    return folder


def test_the_story_says_why_a_trajectory_waited_and_for_what(folder: RunFolder) -> None:
    story = story_lines(folder, 8, TOKENIZER, Dialogue())
    told = [line.split("[bold]")[1].replace("[/]", "") for line in story]
    assert told == [
        "StartGroup  group 0, q:1, truth '2', 2 siblings",
        "LeaseRequested  lease 1, for turn 0: it has 2 tokens and may get 60 more",
        "LeaseDeferred  it waits: no engine has room for it",
        "LeaseGranted  lease 1, after 2.750 s: up to 62 tokens on generator-0: the most KV tokens are free there",
    ]


def test_the_story_of_one_that_did_not_wait_says_so(folder: RunFolder) -> None:
    story = story_lines(folder, 7, TOKENIZER, Dialogue())
    assert any("LeaseGranted" in line and "lease 1, at once: up to 62 tokens on generator-0" in line for line in story)
    assert "it has ended with 12 tokens" in story[-1]


def test_a_trajectory_that_no_log_knows_has_no_story(folder: RunFolder) -> None:
    with pytest.raises(UnusableInput, match="no log knows trajectory 99"):
        story_lines(folder, 99, TOKENIZER, Dialogue())
