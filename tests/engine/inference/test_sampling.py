"""Tests of sampling: draws depend only on seed and position, and follow the requested distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from asterism.engine.inference.sampling import SamplingTensors, draw_uniform, inverse_cdf, mix_seed, sample
from tests.engine.closeness import assert_close


def settings(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.full((rows,), temperature),
        top_p=torch.full((rows,), top_p),
        top_k=torch.full((rows,), top_k),
        mixed_seed=torch.tensor([mix_seed(seed) for seed in range(rows)]),
    )


def frequencies(logits_V: Tensor, asked: SamplingTensors) -> Tensor:
    rows = len(asked.mixed_seed)
    tokens, _ = sample(logits_V.repeat(rows, 1), torch.full((rows,), 11), asked)
    return torch.bincount(tokens, minlength=len(logits_V)) / rows


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf"), 1.5])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_tokens_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    found = frequencies(LOGITS, settings(40_000, temperature))
    assert_close(found, (LOGITS / temperature).softmax(-1), atol=0.01, rtol=0)


def test_top_k_keeps_the_k_most_likely_tokens_and_their_proportions() -> None:
    kept = LOGITS.clone()
    kept[[2, 3, 4]] = float("-inf")
    assert_close(frequencies(LOGITS, settings(40_000, top_k=3)), kept.softmax(-1), atol=0.01, rtol=0)


def test_top_p_keeps_the_smallest_sufficient_set_of_tokens() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    found = frequencies(probabilities.log(), settings(40_000, top_p=0.65))
    assert_close(found, torch.tensor([4 / 7, 3 / 7, 0, 0]), atol=0.01, rtol=0)


def test_a_tiny_top_p_keeps_the_most_likely_token() -> None:
    assert frequencies(LOGITS, settings(100, top_p=1e-6))[0] == 1


def test_temperature_0_selects_the_most_likely_token_in_any_batch() -> None:
    asked = settings(4)._replace(temperature=torch.tensor([0.0, 1.0, 0.0, 2.0]))
    tokens, logprobs = sample(LOGITS.repeat(4, 1), torch.full((4,), 3), asked)
    assert tokens[[0, 2]].tolist() == [0, 0]
    assert_close(logprobs[[0, 2]], LOGITS.log_softmax(-1)[[0, 0]])


def test_top_p_and_top_k_do_not_change_logprobs() -> None:
    tokens, logprobs = sample(LOGITS.repeat(8, 1), torch.arange(8), settings(8, 0.7, top_p=0.5, top_k=2))
    assert_close(logprobs, (LOGITS / 0.7).log_softmax(-1)[tokens])


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    positions, asked = torch.arange(5), settings(5)
    together, _ = sample(logits.clone(), positions, asked)
    alone = [
        sample(
            logits[row : row + 1], positions[row : row + 1], SamplingTensors(*(field[row : row + 1] for field in asked))
        )[0]
        for row in range(5)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


def test_the_ends_of_the_interval_select_tokens_with_nonzero_weight() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).repeat(3, 1)
    drawn = inverse_cdf(weights, torch.tensor([0.0, 0.3, 1 - 2.0**-24]))
    assert drawn.tolist() == [1, 3, 3]


@hypothesis_settings(deadline=None)
@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40).filter(any),
    st.floats(0, 1, exclude_max=True, width=32),
)
def test_every_drawn_token_has_nonzero_weight(weights: list[float], share: float) -> None:
    row = torch.tensor([weights])
    assert row[0, int(inverse_cdf(row.clone(), torch.tensor([share])))] > 0


def test_draws_are_uniform_and_differ_by_seed_and_position() -> None:
    grid = draw_uniform(torch.tensor([[mix_seed(seed)] for seed in range(-100, 100)]), torch.arange(200))
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = torch.histc(grid, bins=20, min=0, max=1) / grid.numel()
    assert_close(counts, torch.full((20,), 0.05), atol=0.005, rtol=0)
    for shifted in (grid[1:, :-1] - grid[:-1, 1:], grid[:, 1:] - grid[:, :-1], grid[1:] - grid[:-1]):
        assert (shifted == 0).float().mean() < 1e-4
    correlation = torch.corrcoef(torch.stack((grid[:, 1:].flatten(), grid[:, :-1].flatten())))[0, 1]
    assert abs(correlation) < 0.02


def test_the_generator_is_the_same_on_every_machine() -> None:
    seeds = torch.tensor([mix_seed(seed) for seed in (0, 1, -1, 2**62)])
    drawn = draw_uniform(seeds, torch.tensor([0, 1, 5, 1000]))
    assert (drawn * 2**24).to(torch.int64).tolist() == [
        reference(0, 0),
        reference(1, 1),
        reference(-1, 5),
        reference(2**62, 1000),
    ]


def reference(seed: int, position: int) -> int:
    """Compute splitmix64 with Python integers."""
    mask = (1 << 64) - 1

    def mixed(x: int) -> int:
        x &= mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    step = 0x9E3779B97F4A7C15
    return mixed(mixed(seed + step) + (position + 1) * step) >> 40
