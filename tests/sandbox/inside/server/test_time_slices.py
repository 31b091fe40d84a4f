"""Tests of the time slices of long calls."""

from hypothesis import given
from hypothesis import strategies as st

from asterism.sandbox.inside.server.time_slices import SLICE_CPU_S, TimeSlices


def test_a_long_call_that_used_its_slice_stops_for_a_waiting_call():
    slices: TimeSlices[str] = TimeSlices(1)
    assert slices.update("first", 0.01, 0, busy=True) == ([], [])
    assert slices.update("second", 0.01, 0, busy=True) == (["second"], [])
    assert slices.update("first", SLICE_CPU_S / 2, 0, busy=True) == ([], [])
    assert slices.update("first", SLICE_CPU_S / 2, 0, busy=True) == (["first"], ["second"])
    assert slices.had_slice("first")
    assert not slices.had_slice("second")
    assert slices.remove("second") == ([], ["first"])


def test_of_long_calls_with_equal_slices_the_one_with_the_most_memory_runs_first():
    slices: TimeSlices[str] = TimeSlices(1)
    for name, memory in (("runs", 0), ("small", 1), ("large", 9), ("middle", 5)):
        slices.update(name, 0.0, memory, busy=True)
    assert slices.remove("runs") == ([], ["large"])
    assert slices.remove("large") == ([], ["middle"])


def test_a_sleeping_long_call_takes_no_slice():
    slices: TimeSlices[str] = TimeSlices(1)
    slices.update("sleeps", 0.1, 0, busy=True)
    assert slices.update("computes", 0.1, 0, busy=True) == (["computes"], [])
    assert slices.update("sleeps", 0.0, 0, busy=False) == ([], ["computes"])
    assert slices.update("sleeps", 0.1, 0, busy=True) == (["sleeps"], [])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["busy", "idle", "remove"]), st.floats(0, 1))),
    st.integers(1, 3),
)
def test_the_number_of_busy_long_calls_reaches_its_limit_and_never_exceeds_it(
    events: list[tuple[int, str, float]], num_running: int
) -> None:
    slices: TimeSlices[int] = TimeSlices(num_running)
    stopped: set[int] = set()
    busy: set[int] = set()
    for call, event, cpu_s in events:
        if event == "remove":
            busy.discard(call)
            to_stop, to_continue = slices.remove(call)
            stopped.discard(call)
        else:
            (busy.add if event == "busy" or call in stopped else busy.discard)(call)
            to_stop, to_continue = slices.update(call, 0.0 if call in stopped else cpu_s, 0, event == "busy")
        assert set(to_continue) <= stopped
        assert not set(to_stop) & stopped
        stopped = (stopped | set(to_stop)) - set(to_continue)
        assert stopped <= busy
        assert len(busy - stopped) == min(len(busy), num_running)
