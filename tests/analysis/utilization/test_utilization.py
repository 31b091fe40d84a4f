"""The report on log lines: time and tokens of engines, waits, last trajectories, and doubtful figures."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.utilization.engine_time import EngineUtilization
from asterism.analysis.utilization.report import compute_utilization, to_json
from asterism.analysis.utilization.step_functions import StepFunction
from asterism.analysis.utilization.step_time import StepUtilization
from asterism.analysis.utilization.trajectory_time import TrajectorySummary
from tests.analysis.utilization.log_lines import Logs


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "run" / "logs")


def engine_of(logs: Logs, engine: str = "generator-0") -> EngineUtilization:
    return next(use for use in compute_utilization(logs.folder).engines if use.engine == engine)


def get_last(step: StepUtilization) -> TrajectorySummary:
    assert step.last is not None
    return step.last


def a_step(logs: Logs) -> None:
    """Log an engine that gets weights at 2 s, works from 3 to 6 s, and is then idle for every cause until 15 s."""
    logs.engine_started(0)
    logs.line("generator-0", 2, "weights.loaded", version=0, load_s=0.5)
    logs.line("head", 2, "step.requested", name="step 1", version=0)
    logs.counted(2, 4, 0, 0, 0)
    logs.counted(3, 0, 4, 0, 0, generator_0=4)
    logs.counted(6, 0, 0, 3, 1)
    logs.counted(9, 0, 4, 0, 0, generator_1=4)
    logs.counted(10, 0, 0, 0, 0)
    logs.load("generator-0", 3)
    logs.load("generator-0", 5, running=4, used_tokens=200, busy_s=2.0, generated_tokens=70)
    logs.load("generator-0", 6.25, used_tokens=300, cached_tokens=300, busy_s=2.9, generated_tokens=80)
    logs.line("head", 14, "step.ended", name="step 1", step_s=12, rollout_s=8.0, train_s=3.0, weights_s=1.0)
    logs.line("generator-0", 14, "weights.loaded", version=1, load_s=0.25)
    logs.line("head", 15, "step.requested", name="step 2", version=1)


class TestEngines:
    def test_each_idle_second_has_a_cause_and_busy_and_idle_time_add_up(self, logs: Logs) -> None:
        a_step(logs)
        use = engine_of(logs)
        assert use.idle_by_cause_s == pytest.approx(
            {"lease": 1, "overhead": 0.1, "tools": 3, "elsewhere": 1, "training": 3, "weights": 1, "nothing": 1}
        )
        assert (use.starting_s, use.active_s, use.busy_s) == pytest.approx((2, 13, 2.9))
        assert use.idle_s == pytest.approx(sum(use.idle_by_cause_s.values())) == pytest.approx(13 - 2.9)

    def test_busy_time_beyond_the_interval_of_a_report_counts_earlier(self, logs: Logs) -> None:
        """A step of 2.5 s ends after the report at 3 s, so the report at 4 s has more than a second of busy time."""
        logs.engine_started(0, loads_weights=True)
        logs.load("generator-0", 1, running=4)
        logs.load("generator-0", 3, running=4)
        logs.load("generator-0", 4, running=4, busy_s=2.5)
        logs.load("generator-0", 5, running=0, busy_s=3.0)
        use = engine_of(logs)
        assert (use.active_s, use.busy_s) == pytest.approx((5, 3.0))

    def test_means_are_over_time_and_not_over_lines(self, logs: Logs) -> None:
        a_step(logs)
        use = engine_of(logs)
        assert use.used_tokens_mean == pytest.approx((200 * 1.25 + 300 * 8.75) / 13)
        assert (use.used_tokens_peak, use.cached_tokens_peak, use.running_peak) == (300, 300, 4)

    def test_an_engine_without_reports_counts_as_idle(self, logs: Logs) -> None:
        a_step(logs)
        assert engine_of(logs).running_mean == pytest.approx(4 * 0.5 / 13)

    def test_running_sequences_are_computed_from_counters_not_samples(self, logs: Logs) -> None:
        """Eight sequences run for one second between two samples. Both samples count 0 sequences."""
        logs.engine_started(0, loads_weights=True)
        logs.load("generator-0", 1)
        logs.load("generator-0", 5, generated_tokens=80, decode_steps=10, busy_s=1.0)
        logs.load("generator-0", 10, generated_tokens=80, decode_steps=10, busy_s=1.0)
        use = engine_of(logs)
        assert (use.running_mean, use.running_peak) == pytest.approx((8 * 1 / 10, 0))

    def test_leased_tokens_come_from_the_ledger_reports(self, logs: Logs) -> None:
        a_step(logs)
        assert engine_of(logs).leased_tokens_mean is None
        logs.line("launcher", 5, "ledger.reported", engine="generator-0", leased_tokens=400, usable_tokens=900)
        use = engine_of(logs)
        assert (use.leased_tokens_mean, use.leased_tokens_peak) == pytest.approx((400 * 10 / 13, 400))

    def test_a_falling_counter_is_a_restart_and_downtime_is_not_counted(self, logs: Logs) -> None:
        for begin in (0, 1000):
            logs.engine_started(begin)
            logs.load("generator-0", begin + 1, generated_tokens=50, evicted_tokens=7, busy_s=0.5)
            logs.load("generator-0", begin + 2, generated_tokens=90, evicted_tokens=7, busy_s=1.5)
        use = engine_of(logs)
        assert (use.generated_tokens, use.evicted_tokens) == (180, 14)
        assert (use.active_s, use.busy_s) == pytest.approx((4, 3))

    def test_idle_time_has_an_unknown_cause_without_trajectory_counts(self, logs: Logs) -> None:
        logs.load("generator-0", 0)
        logs.load("generator-0", 4, busy_s=1.0)
        assert engine_of(logs).idle_by_cause_s == pytest.approx({"unknown": 3})
        assert any("trajectories.counted" in doubt for doubt in compute_utilization(logs.folder).doubts)

    def test_counts_of_several_rollouts_are_added(self, logs: Logs) -> None:
        logs.load("generator-0", 0)
        logs.counted(0, 0, 0, 0, 0)
        logs.counted(1, 0, 0, 2, 0, rollout="rollout-1")
        logs.counted(2, 0, 0, 0, 0)
        logs.counted(3, 0, 0, 0, 0, rollout="rollout-1")
        logs.load("generator-0", 4)
        assert engine_of(logs).idle_by_cause_s == pytest.approx({"tools": 2, "nothing": 2})


class TestTrajectories:
    @pytest.mark.slow
    @given(waits=st.lists(st.tuples(*[st.floats(0, 1e4)] * 4), min_size=1, max_size=30))
    def test_totals_are_the_sums_of_the_lines(
        self, tmp_path_factory: pytest.TempPathFactory, waits: list[tuple[float, ...]]
    ) -> None:
        logs = Logs(tmp_path_factory.mktemp("logs"))
        for number, each in enumerate(waits):
            logs.ended(number, number, *each)
        trajectories = compute_utilization(logs.folder).trajectories
        totals = [wait.total_s for wait in trajectories.waits.values()]
        assert totals == pytest.approx([sum(column) for column in zip(*waits, strict=True)])
        assert (trajectories.ended, trajectories.generated_tokens) == (len(waits), 10 * len(waits))
        lived = [each.lived_s for each in trajectories.longest]
        assert lived == pytest.approx(sorted(map(sum, waits), reverse=True)[:10])

    def test_waits_have_separate_median_and_tail_percentiles(self, logs: Logs) -> None:
        for number in range(101):
            logs.ended(number, number, float(number), 0, 0, 0)
        wait = compute_utilization(logs.folder).trajectories.waits["lease_wait_s"]
        assert (wait.p50_s, wait.p99_s, wait.max_s) == (50, 99, 100)


class TestSteps:
    def test_the_last_trajectory_of_a_step_is_named_with_the_parts_of_its_time(self, logs: Logs) -> None:
        logs.step_started(0, size=10)
        for number in range(9):
            logs.ended(number, 1 + number / 10, 0.1, 0.7, 0.1, 0.1, group_id=7)
        logs.ended(99, 9, 0.2, 2.0, 6.7, 0.1, group_id=7, calls=3)
        logs.line("head", 9, "step.requested", name="step 2", version=1)
        logs.ended(200, 10, 0.5, 0.1, 0.1, 0.1, group_id=8)
        first, second = compute_utilization(logs.folder).steps
        assert (get_last(first).trajectory_id, first.trajectories) == (99, 10)
        assert first.why == "3 calls took 6.70 s, spent 2.00 s generating 10 tokens in 2 turns"
        assert first.tail_s == pytest.approx(9 - 1.8)
        assert second.last is None

    def test_aborted_trajectories_do_not_extend_their_step(self, logs: Logs) -> None:
        logs.step_started(0, size=3)
        for number, ending in enumerate(("answered", "aborted", "aborted")):
            logs.ended(number, 4 + number, 0, 4.0, 0, 0, group_id=7, ending=ending)
        use = compute_utilization(logs.folder)
        (step,) = use.steps
        assert (use.trajectories.ended, use.trajectories.aborted, use.trajectories.failed) == (3, 2, 0)
        assert (step.trajectories, step.aborted, step.tail_s) == (3, 2, 0)
        assert get_last(step).trajectory_id == 0

    def test_a_replacement_trajectory_starts_late(self, logs: Logs) -> None:
        logs.line("head", 0, "step.requested", name="step 1", version=0)
        logs.line("head", 5, "group.started", name="step 1", group_id=7, size=1)
        logs.ended(1, 8, 0.0, 3.0, 0.0, 0.0, group_id=7)
        (step,) = compute_utilization(logs.folder).steps
        assert step.last_began_s == pytest.approx(5)
        assert step.why.startswith("started 5.00 s after the step, spent 3.00 s generating")

    def test_the_last_repetition_of_a_step_counts(self, logs: Logs) -> None:
        for begin in (0, 10):
            logs.line("launcher", begin, "run.started", step=0)
            logs.step_started(begin, size=1, group_id=0)
            logs.ended(begin, begin + 2, 0, 2.0, 0, 0)
        logs.line("head", 14, "step.ended", name="step 1", step_s=4, rollout_s=2.0, train_s=1.0, weights_s=1.0)
        (step,) = compute_utilization(logs.folder).steps
        assert (step.repeats, step.step_s, step.rollout_s, step.trajectories) == (1, 4, 2, 1)
        assert get_last(step).trajectory_id == 10


class TestExecutors:
    def load(self, logs: Logs, t: float, incarnation: int, **changes: float) -> None:
        fields = {
            **{"slots": 2, "running": 0, "queued": 0, "done": 0, "busy_s": 0, "running_s": 0, "queued_s": 0},
            "code_s": 0,
        }
        logs.line("executor-0", t, "executor.load", executor=f"executor-0/{incarnation}", **{**fields, **changes})

    def test_counts_of_an_executors_incarnations_are_added(self, logs: Logs) -> None:
        self.load(logs, 0, 1)
        self.load(logs, 1, 1, done=3, busy_s=0.5, running_s=4, queued_s=1, running=5)
        self.load(logs, 10, 2, done=1, busy_s=1, running_s=2, queued_s=1)
        (use,) = compute_utilization(logs.folder).executors
        assert (use.executor, use.incarnations, use.calls, use.busy_s) == ("executor-0", 2, 4, 1.5)
        assert (use.running_mean, use.running_peak, use.queued_mean) == pytest.approx((0.6, 5, 0.2))
        assert use.queued_s_per_call == pytest.approx(0.5)

    def test_means_are_over_the_time_since_the_first_weights(self, logs: Logs) -> None:
        self.load(logs, 0, 1)
        self.load(logs, 90, 1, done=1, busy_s=40, running_s=40)
        logs.line("generator-0", 100, "weights.loaded", version=0, load_s=0.5)
        self.load(logs, 110, 1, done=5, busy_s=45, running_s=60, queued_s=2, code_s=1)
        (use,) = compute_utilization(logs.folder).executors
        assert (use.span_s, use.busy_s, use.calls, use.running_mean) == (10, 5, 4, 2)
        assert (use.running_s_per_call, use.queued_s_per_call, use.code_s_per_call) == (5, 0.5, 0.25)

    def test_the_timeline_holds_all_call_seconds(self, logs: Logs) -> None:
        self.load(logs, 0, 1)
        self.load(logs, 20, 1, done=3, busy_s=0.5, running_s=4, queued_s=1, running=5)
        use = compute_utilization(logs.folder)
        running = use.timeline.executors["executor-0"]["running"]
        assert sum(running) * use.timeline.bin_s == pytest.approx(4, rel=0.01)
        assert running[0] == 0


class TestLaunches:
    def test_open_phases_of_a_killed_launch_end_at_its_last_line(self, logs: Logs) -> None:
        logs.line("launcher", 0, "run.started", step=0)
        logs.engine_started(1)
        logs.counted(10, 3, 4, 2, 0, generator_0=4)
        logs.load("generator-0", 10, running=4, used_tokens=200, cached_tokens=100, busy_s=2.0)
        logs.line("launcher", 10, "ledger.reported", engine="generator-0", leased_tokens=400, usable_tokens=900)
        logs.line("rollout-0", 12, "trajectory.ended")  # incomplete, so the report ignores the line
        logs.ended(0, 11, 0, 0, 0, 0)
        logs.line("launcher", 90, "run.started", step=1)
        logs.counted(95, 0, 0, 0, 0)
        logs.engine_started(97)
        logs.load("generator-0", 99)
        use = compute_utilization(logs.folder)
        assert (use.paused_s, use.span_s) == pytest.approx((90 - 11, 99 - 79), abs=0.01)
        held_s = 11.0 - 10.0
        phases, engine = use.timeline.trajectories, use.timeline.engines["generator-0"]
        totals = [sum(values) * use.timeline.bin_s for values in (*phases.values(), engine["used"], engine["leased"])]
        assert totals == pytest.approx([3 * held_s, 4 * held_s, 2 * held_s, 0, 200 * held_s, 400 * held_s], abs=0.1)

    def test_a_restarted_process_does_not_end_the_launch(self, logs: Logs) -> None:
        logs.line("launcher", 0, "run.started", step=0)
        for t, name in ((0, "head"), (0, "executor-0"), (40, "head"), (50, "executor-0")):
            logs.line("launcher", t, "process.started", name=name)
        logs.counted(10, 3, 0, 0, 0)
        logs.counted(60, 0, 0, 0, 0)
        use = compute_utilization(logs.folder)
        assert sum(use.timeline.trajectories["leasing"]) * use.timeline.bin_s == pytest.approx(3 * 50, rel=0.01)

    def test_events_repeated_after_a_kill_count_once(self, logs: Logs) -> None:
        logs.line("launcher", 0, "run.started", step=0)
        for _ in range(2):
            logs.ended(7, 11, 1.0, 0, 0, 0)
        logs.line("launcher", 90, "run.started", step=0)
        logs.ended(7, 95, 1.0, 0, 0, 0)  # the resumed run repeats the trajectory
        assert compute_utilization(logs.folder).trajectories.ended == 2


class TestDoubts:
    def test_invalid_lines_are_counted_and_named_and_valid_lines_are_read(self, logs: Logs) -> None:
        logs.ended(0, 1, 1.0, 0, 0, 0)
        logs.text("rollout-0", '{"event": "trajectory.ended", "trajec\n\xff\n\n[1]\n')
        logs.line("rollout-0", 2, "trajectory.ended", trajectory_id=1)
        logs.line("rollout-0", 3, "something.else", data=[1, {}])
        logs.ended(2, 4, 1.0, 0, 0, 0)
        use = compute_utilization(logs.folder)
        assert (use.trajectories.ended, use.unusable_lines, use.lines) == (2, 5, 8)
        (doubt,) = (doubt for doubt in use.doubts if "could not be read" in doubt)
        assert "rollout-0.jsonl, line 2" in doubt
        assert "and 2 more" in doubt

    def test_trajectories_without_an_end_are_counted(self, logs: Logs) -> None:
        logs.line("head", 0, "group.started", name="step 1", group_id=0, size=4)
        logs.ended(0, 1, 1.0, 0, 0, 0)
        assert any(
            doubt.startswith("4 trajectories were started and 1 ended")
            for doubt in compute_utilization(logs.folder).doubts
        )

    def test_inconsistent_token_counts_are_reported(self, logs: Logs) -> None:
        logs.load("generator-0", 0, generated_tokens=100)
        logs.ended(0, 1, 1.0, 0, 0, 0, generated_tokens=98)
        assert any("engines generated 100 tokens" in doubt for doubt in compute_utilization(logs.folder).doubts)
        logs.ended(1, 1, 1.0, 0, 0, 0, generated_tokens=2)
        assert not any("engines generated" in doubt for doubt in compute_utilization(logs.folder).doubts)
        logs.load("generator-0", 1, generated_tokens=132)
        logs.line("generator-0", 1, "weights.loaded", version=0, load_s=0.5, probe_tokens=32)
        assert not any("engines generated" in doubt for doubt in compute_utilization(logs.folder).doubts)

    def test_the_error_names_a_folder_without_logs(self, tmp_path: Path) -> None:
        (tmp_path / "logs").mkdir()
        with pytest.raises(AnalysisError, match=str(tmp_path / "logs")):
            compute_utilization(tmp_path / "logs")

    def test_empty_logs_make_an_empty_report(self, logs: Logs) -> None:
        logs.text("head", "")
        use = compute_utilization(logs.folder)
        assert (use.engines, use.steps, use.trajectories.ended) == ((), (), 0)
        assert len(use.doubts) == 7
        assert json.loads(to_json(use))["doubts"] == list(use.doubts)


@given(
    steps=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100)), min_size=1, max_size=20),
    cuts=st.lists(st.floats(0, 200), min_size=1, max_size=20),
)
def test_means_of_adjacent_intervals_add_up_to_the_total(steps: list[tuple[float, float]], cuts: list[float]) -> None:
    spans, values = np.array(steps).T
    curve = StepFunction(np.cumsum(spans), values)
    edges = np.array(sorted({0.0, 200.0, *cuts}))
    (total_mean,) = curve.compute_means(np.array([0, 200]))
    assert (curve.compute_means(edges) * np.diff(edges)).sum() == pytest.approx(total_mean * 200, abs=1e-6)
