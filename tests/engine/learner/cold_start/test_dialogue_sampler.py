"""Tests of the order of cold-start dialogues and their division into steps."""

import numpy as np
import pytest

from asterism.engine.learner.cold_start.dialogue_sampler import SftSampler, StepSize


def test_each_epoch_has_every_sequence_once_and_batches_span_epochs() -> None:
    order = SftSampler([10], [1.0], StepSize(4), seed=2)
    drawn = [index for step in range(5) for index in order.get_batch(step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]


def test_seed_and_step_determine_the_order_of_the_cold_start() -> None:
    steps = (7, 0, 3)
    one, other = SftSampler([10, 7], [1, 2], StepSize(4), seed=2), SftSampler([10, 7], [1, 2], StepSize(4), seed=2)
    assert [one.get_batch(step) for step in steps] == [other.get_batch(step) for step in reversed(steps)][::-1]
    assert one.get_batch(0) != SftSampler([10, 7], [1, 2], StepSize(4), seed=3).get_batch(0)


def test_a_cold_start_without_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="no sequence"):
        SftSampler([3, 0], [1, 1], StepSize(4), 0)


def test_the_files_of_a_mixture_alternate_by_weight_with_separate_epochs() -> None:
    sizes, weights = [5, 30, 7], [1, 2.5, 0.5]
    order = SftSampler(sizes, weights, StepSize(8), seed=2)
    drawn = [index for step in range(20) for index in order.get_batch(step)]
    by_file = [[index for index in drawn if low <= index < high] for low, high in ((0, 5), (5, 35), (35, 42))]
    assert [len(each) for each in by_file] == [40, 100, 20]
    assert all(sorted(by_file[0][start : start + 5]) == list(range(5)) for start in range(0, 40, 5))
    assert sorted(by_file[1][:30]) == list(range(5, 35))
    for end in range(len(drawn)):
        counts = [sum(low <= index < high for index in drawn[:end]) for low, high in ((0, 5), (5, 35), (35, 42))]
        assert all(abs(count - end * weight / 4) < 3 for count, weight in zip(counts, weights, strict=True))


def make_token_sampler(lengths: list[int], tokens: int) -> SftSampler:
    return SftSampler([len(lengths)], [1.0], StepSize(64, tokens), 2, np.array(lengths))


def test_a_token_limit_per_step_does_not_change_the_order_of_dialogues() -> None:
    lengths = [7, 30, 5, 41, 12, 3, 20, 9, 60, 1]
    sampler = make_token_sampler(lengths, 50)
    steps = [sampler.get_batch(step) for step in range(40)]
    drawn = [index for step in steps for index in step]
    plain = SftSampler([10], [1.0], StepSize(len(drawn)), seed=2)
    assert drawn == plain.get_batch(0)
    totals = [sum(lengths[index] for index in step) for step in steps]
    assert all(total <= 50 or len(step) == 1 for total, step in zip(totals, steps, strict=True))
    # Each step is full: the next dialogue does not fit.
    assert all(total + lengths[step[0]] > 50 for total, step in zip(totals, steps[1:], strict=False))


def test_seed_and_step_determine_steps_with_a_token_limit() -> None:
    lengths = list(range(1, 30))
    one, other = make_token_sampler(lengths, 40), make_token_sampler(lengths, 40)
    steps = (9, 2, 5)
    assert [one.get_batch(step) for step in steps] == [other.get_batch(step) for step in sorted(steps)][::-1][:1] + [
        other.get_batch(step) for step in steps[1:]
    ]


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 5), (2.0, 10), (0.5, 3), (1.1, 6), (0.01, 1)])
def test_an_epoch_has_as_many_dialogues_as_all_files_together(epochs: float, steps: int) -> None:
    assert SftSampler([10, 10], [1, 3], StepSize(4), seed=0).count_steps(epochs) == steps


def test_epochs_with_a_token_limit_include_every_dialogue() -> None:
    lengths = [7, 30, 5, 41, 12, 3, 20, 9, 60, 1]
    sampler = make_token_sampler(lengths, 50)
    steps = sampler.count_steps(2.0)
    drawn = [index for step in range(steps) for index in sampler.get_batch(step)]
    assert sorted(drawn[:20]) == sorted([*range(10), *range(10)])
    assert sum(len(sampler.get_batch(step)) for step in range(steps - 1)) < 20
