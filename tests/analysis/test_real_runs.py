"""Reports and simulations of real runs: with small caches, aborted groups and a kill."""

import json
from pathlib import Path
from typing import Any, TypeVar

import pytest

from asterism.actors.cli.planning.simulate_command import SimulateOptions, simulate_workload
from asterism.actors.cli.report_command import report_run
from asterism.analysis import cold_start_curves, curves
from asterism.analysis.metric_lines import decode_metric_lines
from asterism.analysis.metrics import read_metrics
from asterism.analysis.plotting import draw_figure
from asterism.analysis.simulation.recorded_workload import load_recorded_step
from asterism.analysis.simulation.simulate import simulate
from asterism.analysis.summary_table import read_summary
from asterism.analysis.utilization import utilization_figure
from asterism.analysis.utilization.log_schema import read_log_tables
from asterism.analysis.utilization.report import Utilization, compute_utilization
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import CodeFinished, TrajectoryAborted, TrajectoryFinished, WeightsLoaded
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import Start, from_cold_start_of, read_log_entries, whole_run
from tests.consoles import capture
from tests.simulation.invariants import select

pytestmark = pytest.mark.slow
T = TypeVar("T")

SETTINGS = (
    *("rl.steps=2", "rl.prompts=8", "rl.rollouts=16", "evaluation.questions=0", "engine.num_engines=2"),
    "engine.kv_tokens=1100",  # two engines hold a third of a step's 128 trajectories
)


@pytest.fixture(scope="module")
def settings(finished_run: tuple[RunFolder, str]) -> tuple[str, ...]:
    """Return settings of a run with small caches, after a cold start that suffices for calls and some right answers."""
    return (*from_cold_start_of(finished_run[0]), *SETTINGS)


def messages(folder: RunFolder, log: str, kind: type[T]) -> list[T]:
    logged = read_events(folder.events / f"{log}.sqlite", kinds=(kind.__name__,))
    return select([event for event, _ in logged], kind)


def count_probed_tokens(folder: RunFolder) -> int:
    """Count the tokens of probes. After each load of weights, an engine generates one token per prompt of a probe."""
    return sum(len(each.probe_logprobs) for each in messages(folder, "head", WeightsLoaded))


def reported(folder: RunFolder) -> tuple[Utilization, str]:
    """Return the report's data and its output."""
    shown = capture(lambda console: report_run(folder.path, json=False, console=console), 100)
    assert folder.utilization_plot.read_bytes().startswith(b"\x89PNG")
    return compute_utilization(folder.logs), shown


def simulated(folder: RunFolder, **changes: Any) -> str:
    options = SimulateOptions(str(folder.path), "static,kv_lookahead", **changes)
    return capture(lambda console: simulate_workload(options, console))


def test_report_summary_metrics_logs_and_pictures_have_equal_totals(
    finished_run: tuple[RunFolder, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished_run[0]
    subtitles: list[str] = []

    def draw_figure_and_record(path: Path, title: str, subtitle: str, *panels: Any, **options: Any) -> Path:
        subtitles.append(subtitle)
        return draw_figure(path, title, subtitle, *panels, **options)

    for module in (cold_start_curves, curves, utilization_figure):
        monkeypatch.setattr(module, "draw_figure", draw_figure_and_record)
    use, shown = reported(folder)
    summary, metrics = read_summary(folder.path), read_metrics(folder.path)
    lines = decode_metric_lines(folder.metrics)
    finished = messages(folder, "head", TrajectoryFinished)
    totals = use.trajectories
    assert totals.started == totals.ended == summary["trajectories_started"] == len(finished)
    questions = sum(line["questions"] for line in lines if line["kind"] == "evaluation")
    assert metrics.steps["trajectories"].sum() + questions == totals.ended
    assert totals.generated_tokens == sum(sum(each.record.loss_mask) for each in finished)
    assert totals.generated_tokens + count_probed_tokens(folder) == sum(
        engine.generated_tokens for engine in use.engines
    )
    executed = {(each.trajectory_id, each.call) for each in messages(folder, "rollout-0", CodeFinished)}
    assert sum(executor.calls for executor in use.executors) == len(executed) <= totals.calls
    assert (f"({totals.calls - len(executed):,} not executed)" in shown) == (totals.calls > len(executed))
    for step, line in zip(
        (each for each in use.steps if each.rollout_s), metrics.steps.iter_rows(named=True), strict=True
    ):
        assert (step.name, step.repeats) == (f"step {line['step']}", 0)
        assert step.trajectories == line["trajectories"] + line["trajectories_failed"]
        assert step.last is not None and step.last_began_s is not None
        # The step's begin is derived from the time of its last log line, which a busy machine writes late.
        assert step.last_began_s + step.last.lived_s <= step.rollout_s + 0.1
        assert (step.rollout_s, step.train_s, step.weights_s) == (line["rollout_s"], line["train_s"], line["weights_s"])
    for worker_s, busy_s in (
        *((each.active_s, each.busy_s) for each in use.engines),
        *((each.span_s, each.busy_s) for each in use.executors),
    ):
        assert worker_s == pytest.approx(use.span_s - use.timeline.begin_s, rel=0.2)  # engines start one after another
        assert 0 < busy_s < worker_s
    cold_start, rl, time = subtitles
    assert cold_start == f"cold start, {metrics.sft.height} steps"
    assert metrics.sft["step"].to_list() == list(range(1, metrics.sft.height + 1))
    assert f"{summary['tokens_per_s']:,.0f} tokens/s" in rl
    assert f"1 executor, {totals.ended:,} trajectories in {use.span_s - use.timeline.begin_s:,.1f} s" in time


def test_the_simulation_of_a_recorded_step_has_the_same_trajectories(finished: RunFolder) -> None:
    """`python -m benchmarks.validation` compares the durations."""
    for number in (1, 2):
        step = load_recorded_step(finished, number)
        outcome = simulate(step.workload, step.cluster, step.policy)
        ended = messages(finished, "head", TrajectoryFinished)
        assert step.left_out == 0
        assert outcome.generated_tokens == sum(plan.generated_tokens for plan in step.workload.plans)
        assert {plan.generated_tokens for plan in step.workload.plans} <= {sum(each.record.loss_mask) for each in ended}
        assert outcome.waits_s["lease to begin"] > 0
        assert outcome.evictions == outcome.preemptions == 0
        assert outcome.makespan_s > 0
        assert step.measured_s > 0


def test_simulate_compares_policies_with_the_measured_makespan(finished: RunFolder, tmp_path: Path) -> None:
    output = simulated(finished, json_file=tmp_path / "step.json", run=tmp_path / "simulated")
    assert "step 3 of demo on the recorded engines" in output
    assert "measured makespan" in output
    ours = {each["policy"]: each for each in json.loads((tmp_path / "step.json").read_bytes())}
    assert ours["static"]["measured_s"] is None
    assert ours["kv_lookahead"]["measured_s"] == load_recorded_step(finished).measured_s
    use, _ = reported(RunFolder(tmp_path / "simulated" / "kv_lookahead"))
    assert use.trajectories.generated_tokens == ours["kv_lookahead"]["generated_tokens"]
    assert use.doubts == ()


@pytest.mark.nightly
def test_aborted_trajectories_are_reported(tmp_path: Path, settings: tuple[str, ...]) -> None:
    more = ("rl.prompts=1", "rl.group_oversampling=12", "rl.surplus_groups=abort")
    folder, _ = whole_run(tmp_path, *settings, *more)
    use, shown = reported(folder)
    finished = messages(folder, "head", TrajectoryFinished)
    aborted = messages(folder, "head", TrajectoryAborted)
    assert use.trajectories.aborted == len(aborted) > 0
    assert f"{len(aborted)} were aborted" in shown
    assert use.trajectories.started == use.trajectories.ended == len(finished) + len(aborted)
    assert use.trajectories.failed == 0
    generated = sum(each.generated_tokens for each in use.engines) - count_probed_tokens(folder)
    assert use.trajectories.generated_tokens == pytest.approx(generated, rel=0.01)
    for step in use.steps:
        assert step.last is not None
        assert step.last.ending != "aborted"
    assert use.doubts == ()
    assert f"{load_recorded_step(folder).left_out} failed or aborted trajectories are excluded" in simulated(folder)


@pytest.mark.nightly
def test_a_killed_run_is_reported_before_and_after_resuming(
    tmp_path: Path, settings: tuple[str, ...], start: Start
) -> None:
    run = start(tmp_path, *settings)
    folder = run.folder
    # kill in the middle of the second step
    run.wait_until(lambda: folder.get_checkpoint_path(1).exists() and count_ends(folder) >= 160)
    run.kill()
    before, shown = reported(folder)
    assert before.trajectories.ended >= 128
    assert before.trajectories.started is not None
    assert before.trajectories.started > before.trajectories.ended
    assert any("the others were abandoned" in doubt for doubt in before.doubts)
    assert "doubt:" in shown
    assert before.steps[-1].step_s is None
    simulated(folder, step=1)
    start(tmp_path, *settings, "--resume").succeed()
    after, _ = reported(folder)
    assert [step.name for step in after.steps if step.step_s is not None] == ["step 1", "step 2"]
    assert after.trajectories.ended >= before.trajectories.ended + 128
    assert [step.repeats for step in after.steps] == [0, 1]
    assert after.paused_s > 0
    began = read_log_tables(folder.logs).frames["engine.started"]["t"].sort()
    for engine in after.engines:
        assert engine.busy_s + engine.idle_s == pytest.approx(engine.active_s)
        assert engine.active_s + engine.starting_s <= after.span_s - began[0] + 0.01
    simulated(folder, step=2)


def count_ends(folder: RunFolder) -> int:
    return len(read_log_entries(folder, "trajectory.ended", "rollout-0"))
