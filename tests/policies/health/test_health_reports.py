"""The recorder's health reports: messages, the end of the run, resumed runs, replays, and the share of recomputed tokens."""

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from asterism.bus import messages as msg
from asterism.bus.addresses import LAUNCHER, METRICS
from asterism.bus.codec import decode, encode
from asterism.configs.schema.health import HealthConfig
from asterism.policies.decider import Send
from asterism.policies.recorder import Recorder
from tests.policies.arbiter.leases import load
from tests.policies.health.histories import list_step_events

TOO_LONG = msg.StepCounts(
    msg.TaskCounts(groups=2, trajectories=8, positives=4, reward=4.0), endings={"length": 6, "answered": 2}
)


def decide_all(recorder: Recorder, events: Sequence[msg.AnyMessage]) -> list[Send]:
    return [send for now, event in enumerate(events) for send in recorder.decide(float(now), event)]


def list_events(steps: Sequence[int]) -> list[msg.AnyMessage]:
    return [event for step in steps for event in list_step_events(step, TOO_LONG)]


def list_health_sends(sends: Sequence[Send]) -> list[Send]:
    return [send for send in sends if isinstance(send.message, msg.HealthReported | msg.RunFailed)]


def test_metrics_and_launcher_receive_a_warning_once() -> None:
    sends = list_health_sends(decide_all(Recorder(steps=9), list_events(range(1, 8))))
    assert [send.to for send in sends] == [METRICS, LAUNCHER]
    (report,) = {send.message for send in sends}
    assert isinstance(report, msg.HealthReported)
    assert (report.step, report.check, report.action) == (3, "length_limit", "warn")
    assert report.message.startswith("health.length_limit: 75% of the trajectories of the last 3 steps ")


def test_a_check_with_the_action_stop_also_ends_the_run() -> None:
    recorder = Recorder(9, HealthConfig(length_limit="stop", window_steps=2))
    sends = list_health_sends(decide_all(recorder, list_events((1, 2))))
    assert [(send.to, type(send.message)) for send in sends] == [
        (METRICS, msg.HealthReported),
        (LAUNCHER, msg.HealthReported),
        (LAUNCHER, msg.RunFailed),
    ]
    report, failure = sends[1].message, sends[2].message
    assert isinstance(report, msg.HealthReported)
    assert failure == msg.RunFailed(f"step 2: {report.message}")
    assert report.action == "stop"


def test_a_check_that_is_off_reports_nothing() -> None:
    recorder = Recorder(9, HealthConfig(length_limit="off"))
    assert list_health_sends(decide_all(recorder, list_events(range(1, 8)))) == []


def test_the_window_of_a_resumed_run_is_empty() -> None:
    recorder = Recorder(steps=9)
    assert list_health_sends(decide_all(recorder, list_events((1, 2)))) == []
    decide_all(recorder, [msg.RunStarted(2, msg.BufferCursor())])
    assert list_health_sends(decide_all(recorder, list_events((3, 4)))) == []
    assert len(list_health_sends(decide_all(recorder, list_events((5,))))) == 2


def test_a_resumed_run_has_the_health_limits_of_its_new_launch() -> None:
    recorder = Recorder(9, HealthConfig(length_limit="stop"))
    decide_all(recorder, [msg.RunStarted(0, msg.BufferCursor(), HealthConfig(window_steps=1))])
    (*_, last) = decide_all(recorder, list_events((1,)))
    assert isinstance(last.message, msg.HealthReported)
    assert (last.message.step, last.message.action) == (1, "warn")


def test_a_replay_repeats_reports_and_states_byte_for_byte() -> None:
    health, events = HealthConfig(length_limit="stop"), list_events(range(1, 6))
    frames = [encode(msg.Envelope("", "head/recorder", event)) for event in events]

    def replay() -> Iterator[bytes]:
        recorder = Recorder(9, health)
        for now, frame in enumerate(frames):
            event = decode(frame).message
            yield msgspec.msgpack.encode(recorder.decide(float(now), event))
            yield msgspec.msgpack.encode(recorder.get_state_after(event))

    recorded = list(replay())
    assert list(replay()) == recorded
    assert any(b"health.length_limit: " in each for each in recorded)


# ---------------------------------------------------------------- recomputed tokens


def get_recomputed_share(recorder: Recorder, step: int, *loads: msg.EngineLoadReported) -> float | None:
    """Return the share of recomputed tokens in a step in which engines send these load reports."""
    *before, synced = list_step_events(step, TOO_LONG)
    sends = decide_all(recorder, [*before, *loads, synced])
    (line,) = [send.message for send in sends if isinstance(send.message, msg.MetricsRecorded)]
    return line.values.get("recomputed_share")


def test_the_share_of_recomputed_tokens_covers_all_engines_since_the_previous_step() -> None:
    recorder = Recorder(steps=9)
    assert get_recomputed_share(recorder, 1) is None
    assert (
        get_recomputed_share(
            recorder,
            2,
            load(prefilled_tokens=100, recomputed_tokens=0),
            load("generator-1", prefilled_tokens=100, recomputed_tokens=50),
        )
        == 0.25
    )
    assert get_recomputed_share(recorder, 3, load(prefilled_tokens=200, recomputed_tokens=100)) == 1.0
    assert get_recomputed_share(recorder, 4, load(prefilled_tokens=200, recomputed_tokens=100)) is None


def test_the_counters_of_a_restarted_engine_begin_at_0() -> None:
    recorder = Recorder(steps=9)
    assert get_recomputed_share(recorder, 1, load(prefilled_tokens=1000, recomputed_tokens=0)) == 0.0
    assert get_recomputed_share(recorder, 2, load(prefilled_tokens=40, recomputed_tokens=10, incarnation=2)) == 0.25
    with pytest.raises(msg.ProtocolError, match="incarnation 1 of generator-0 had already left"):
        recorder.decide(0.0, load(prefilled_tokens=2000, recomputed_tokens=0))


def test_lasting_recomputation_is_reported() -> None:
    recorder, reported = Recorder(steps=9), list[str]()
    counts = msgspec.structs.replace(TOO_LONG, endings={"answered": 8})
    for step in range(1, 6):
        *before, synced = list_step_events(step, counts)
        sends = decide_all(recorder, [*before, load(prefilled_tokens=100 * step, recomputed_tokens=50 * step), synced])
        reported += [send.message.check for send in sends if isinstance(send.message, msg.HealthReported)]
    assert reported == ["recomputation"] * 2  # one report to the metrics and one to the launcher
