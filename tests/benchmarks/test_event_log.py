"""The event-log benchmark measures logs with the content of a run's logs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.cli.log.story_command import format_story, load_text_context
from analysis.event_logs.merged_events import merge_events
from benchmarks.event_log import (
    TokenSampler,
    measure_log_events_per_s,
    measure_step_bytes,
    measure_story_query_ms,
    write_logged_run,
)
from bus.messages import CodeFinished, CodeOk, Output, TrajectoryFinished, TurnGenerated
from configs.run_folder import RunFolder
from tests.fakes import generated


def test_a_trajectory_of_the_synthetic_run_has_its_story(tmp_path: Path) -> None:
    folder = RunFolder(write_logged_run(tmp_path / "run", 960))
    assert sum(1 for _ in merge_events(folder)) == 960 + 2  # and two groups
    story = format_story(folder, 20, load_text_context(folder))
    assert len(story) == 24 + 1
    assert "StartGroup" in story[0]
    assert measure_story_query_ms(folder.path, 960) > 0


def test_every_event_of_the_speed_measurement_is_committed(tmp_path: Path) -> None:
    assert measure_log_events_per_s(tmp_path, 500) > 0
    (tmp_path / "events").mkdir()
    (tmp_path / "speed.sqlite").rename(tmp_path / "events" / "speed.sqlite")
    events = list(merge_events(RunFolder(tmp_path)))
    assert len(events) == 500
    assert all(each.decision is not None for each in events)


def test_random_tokens_replace_the_zeros_of_the_simulation() -> None:
    draws = TokenSampler()
    turn = draws.fill_tokens(generated(7, 0, "x" * 99))
    assert isinstance(turn, TurnGenerated)
    assert len(turn.token_ids) == len(turn.logprobs) == len(turn.versions) == 400
    assert np.frombuffer(turn.token_ids, "<i4").max() < 151_000
    assert np.frombuffer(turn.logprobs, "<f4").max() <= 0
    mask = bytes(40) + b"\x01" * 60
    end = TrajectoryFinished(7, 0, 1.0, "answered", 40, bytes(400), mask, b"", b"", 1, 0, 0, 0, 1, 1, 0, 0, 0, 0)
    filled = draws.fill_tokens(end)
    assert isinstance(filled, TrajectoryFinished)
    versions = np.frombuffer(filled.versions, "<i4")
    assert versions.tolist() == [-1] * 40 + [5] * 60
    assert not np.frombuffer(filled.logprobs, "<f4")[:40].any()
    told = draws.fill_tokens(CodeFinished(7, 0, CodeOk(Output("12")), 0.1, "executor-0/1"))
    assert isinstance(told, CodeFinished)
    assert len(told.outcome.output.stdout) == 48  # pyright: ignore


@pytest.mark.slow
def test_compression_shortens_a_steps_logs(tmp_path: Path) -> None:
    packed, plain = (measure_step_bytes(tmp_path, compress=compress, share=1 / 512) for compress in (True, False))
    assert 5e8 < plain < 5e9
    assert packed < 0.5 * plain
