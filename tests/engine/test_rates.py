import pytest

from engine.rates import cosine, linear


def test_the_cosine_rises_over_the_warm_up_and_ends_near_zero() -> None:
    rates = [cosine(step, 100, 10) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert 0 < rates[-1] < 1e-3


def test_the_line_rises_over_the_warm_up_and_reaches_its_final_fraction_with_the_last_step() -> None:
    rates = [linear(step, 60, 5, 0.2) for step in range(60)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.2)
    assert linear(70, 60, 5, 0.2) == pytest.approx(0.2)
    assert linear(0, 1, 0, 0.2) == 1.0
