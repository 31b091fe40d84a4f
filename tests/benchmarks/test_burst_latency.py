"""The burst benchmark reports latencies, and the cores that the report's step needs at the measured rate."""

import pytest

from asterism.sandbox.load_test import LoadFigures
from benchmarks.support.sandbox.executor_burst import BurstMemory, BurstResult, compute_latency_figures

MEMORY = BurstMemory(1.0, 1.0)


def make_result(answered: int, elapsed_s: float) -> BurstResult:
    """Make a result in which the latency of call n is n ms, of which the call runs for 1 ms."""
    latencies_ms = [float(number) for number in range(1, answered + 1)]
    figures = LoadFigures(answered, answered, 0, 0, {}, elapsed_s, latencies_ms)
    return BurstResult(figures, MEMORY, MEMORY, MEMORY, [1.0] * answered, [each - 1 for each in reversed(latencies_ms)])


def test_total_and_queued_time_have_their_percentiles() -> None:
    figures = compute_latency_figures(make_result(200, 0.2))
    assert (figures["burst_total_p50_ms"], figures["burst_total_p99_ms"]) == (100.0, 198.0)
    assert (figures["burst_queued_p50_ms"], figures["burst_queued_p99_ms"]) == (99.0, 197.0)
    assert (figures["burst_ran_p50_ms"], figures["burst_ran_p99_ms"]) == (1.0, 1.0)


@pytest.mark.parametrize("cores", [1, 4])
def test_the_cores_for_the_reports_step_follow_from_the_rate_of_one_core(cores: int) -> None:
    """At 1,000 calls per second and core, 45,000 calls take 45 CPU seconds; 75 cores answer them within 0.6 s."""
    figures = compute_latency_figures(make_result(1000 * cores, 1.0), cores)
    assert figures["report_45k_cpu_s"] == pytest.approx(45.0)
    assert figures["report_45k_at_once_cores"] == pytest.approx(75.0)
