"""Who waits for whom where the learner has asked for the engines' memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors import waits
from actors.wiring import HEAD, ROLLOUT
from bus.codec import encode
from bus.event_log import EventLog
from bus.messages import AnyMessage, BufferCursor, EngineRested, Envelope, MemoryWanted, RestRequested, RunStarted
from configs.run_folder import RunFolder
from tests.golden.logs import world_again
from tests.simulation.campaign import RUN


def told(folder: RunFolder, process: str, actor: str, *messages: AnyMessage) -> None:
    """Its event log: a message a second."""
    folder.events.mkdir(parents=True, exist_ok=True)
    log = EventLog(folder.events / f"{process}.sqlite")
    for at, message in enumerate(messages, 1):
        log.append(at, actor, "x", type(message).__name__, None, encode(Envelope("x", f"{process}/{actor}", message)))
    log.close()


def test_the_learner_waits_for_the_engines_that_have_not_given_their_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "deciders_of", lambda process, run, _: world_again(run).deciders()[process])  # pyright: ignore
    folder, wanted = RunFolder(tmp_path), MemoryWanted(1, -1)
    rested = EngineRested("generator-0", 1, RestRequested(1, -1))
    told(folder, ROLLOUT, ROLLOUT, RunStarted(0, BufferCursor()))
    told(folder, HEAD, "recipe", RunStarted(0, BufferCursor()), wanted, rested)
    found = [wait for wait in waits.waits_of(RUN, folder) if wait.who == "learner"]
    assert found == [waits.Wait("learner", "generator-1", "it has not given its memory back", 2.0)]
