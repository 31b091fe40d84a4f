import pytest

from asterism.engine.learner.lr_schedules import cosine_schedule, linear_schedule


def test_the_cosine_schedule_warms_up_and_ends_near_zero() -> None:
    rates = [cosine_schedule(step, 100, 10) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert 0 < rates[-1] < 1e-3


def test_the_linear_schedule_warms_up_and_ends_at_its_final_fraction() -> None:
    rates = [linear_schedule(step, 60, 5, 0.2) for step in range(60)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.2)
    assert linear_schedule(70, 60, 5, 0.2) == pytest.approx(0.2)
    assert linear_schedule(0, 1, 0, 0.2) == 1.0
