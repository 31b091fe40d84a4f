"""The overlong penalty, and the filters of overlong and repetitive responses."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asterism.bus.messages import Ending, TokenRecord, TrajectoryFinished
from asterism.configs.load import load_run
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.schema.algorithm import RlConfig, RocConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.policies.groups.advantages import compute_advantages
from asterism.policies.groups.response_filters import compute_overlong_penalty, repeats_ngram
from asterism.policies.groups.selection import GroupSelection, SelectionRules, select_rows
from asterism.policies.step_metrics import StepTimes, compute_step_metrics
from tests.policies.groups.buffers import BufferDriver, get_collected
from tests.policies.groups.finished import finished

PROMPT = 3


def respond(number: int, reward: float, token_ids: list[int], ending: Ending = "answered") -> TrajectoryFinished:
    size = len(token_ids)
    mask = bytes(PROMPT) + b"\x01" * size
    ids = np.array([0] * PROMPT + token_ids, np.int32).tobytes()
    record = TokenRecord(PROMPT, ids, mask, bytes(4 * (PROMPT + size)), bytes(4 * (PROMPT + size)))
    return replace(finished(number, reward), record=record, ending=ending)


def select(group: list[TrajectoryFinished], *, resamples: bool = False, **rl: Any) -> GroupSelection:
    run = RunConfig(
        name="a",
        dialogue=DialogueConfig(response_tokens=100),
        rl=RlConfig(prompts=1, rollouts=4, **rl),
        roc=RocConfig(enabled=resamples),
    )
    return select_rows(SelectionRules.from_config(run), group, 1)


class TestOverlongPenalty:
    @pytest.mark.parametrize(
        ("tokens", "ending", "penalty"),
        [
            *((0, "answered", 0.0), (80, "answered", 0.0), (81, "answered", 0.025), (90, "turns", 0.25)),
            *((100, "answered", 0.5), (60, "length", 0.5), (100, "length", 0.5)),
        ],
    )
    def test_the_penalty_rises_linearly_in_the_buffer(self, tokens: int, ending: Ending, penalty: float) -> None:
        rl = RlConfig(overlong_buffer_tokens=20, overlong_penalty=0.5)
        found = compute_overlong_penalty(respond(0, 1.0, [7] * tokens, ending), rl, limit=100)
        assert found == pytest.approx(penalty)
        assert compute_overlong_penalty(respond(0, 1.0, [7] * tokens, ending), RlConfig(), limit=100) == 0.0

    def test_the_penalty_gives_a_group_of_equal_rewards_a_gradient(self) -> None:
        group = [respond(number, 1.0, [7] * size) for number, size in enumerate((10, 50, 90, 100))]
        assert select(group).verdict == "rejected"
        selection = select(group, overlong_buffer_tokens=20)
        assert selection.verdict == "accepted"
        assert [row.advantage for row in selection.rows] == compute_advantages([1.0, 1.0, 0.5, 0.0])
        assert selection.dropped == {}

    def test_the_penalty_does_not_change_the_positives_of_roc(self) -> None:
        """The penalty is larger than the rewards of both long positives."""
        group = [respond(number, float(number > 1), [7] * 100) for number in range(4)]
        rows = select(group, resamples=True, overlong_buffer_tokens=20, overlong_penalty=2.0).rows
        assert sorted(row.trajectory_id > 1 for row in rows) == [False, True]

    def test_the_penalty_uses_the_length_limit_of_each_task(self) -> None:
        tasks = tuple(
            TaskConfig(name=name, data="a", test="b", dialogue=DialogueConfig(response_tokens=limit))
            for name, limit in (("short", 50), ("long", 100))
        )
        rl = RlConfig(prompts=1, rollouts=4, overlong_buffer_tokens=20)
        rules = SelectionRules.from_config(RunConfig(name="a", tasks=tasks, rl=rl, roc=RocConfig(enabled=False)))
        group = [respond(number, 1.0, [7] * size) for number, size in enumerate((10, 10, 40, 40))]
        assert [select_rows(rules, group, 1, name).verdict for name in ("short", "long")] == ["accepted", "rejected"]

    def test_a_buffer_as_long_as_the_response_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match=r"rl\.overlong_buffer_tokens = 64 must be below dialogue\.response_tokens = 64"
        ):
            load_run(None, ("name=a", "dialogue.response_tokens=64", "rl.overlong_buffer_tokens=64"))


class TestFilters:
    def test_responses_that_end_at_the_length_limit_are_dropped(self) -> None:
        endings: list[Ending] = ["length", "answered", "turns", "answered"]
        group = [respond(number, number % 2, [7], ending) for number, ending in enumerate(endings)]
        selection = select(group, overlong="drop")
        assert [row.trajectory_id for row in selection.rows] == [1, 2, 3]
        assert [row.advantage for row in selection.rows] == compute_advantages([1.0, 0.0, 1.0])
        assert selection.dropped == {"overlong": 1}
        assert select(group).dropped == {}

    def test_a_group_with_too_few_remaining_responses_is_lost(self) -> None:
        group = [respond(number, number % 2, [7], "length" if number else "answered") for number in range(4)]
        assert select(group, overlong="drop") == GroupSelection("lost", [], {"overlong": 3})

    def test_repetitive_responses_are_dropped(self) -> None:
        texts = [[1, 2] * 8, [1, 2] * 4, list(range(16)), [5] * 9]
        group = [respond(number, number % 2, text) for number, text in enumerate(texts)]
        selection = select(group, repeated_ngram_tokens=2, repeated_ngram_limit=7)
        assert [row.trajectory_id for row in selection.rows] == [1, 2]
        assert selection.dropped == {"repeated": 2}

    @given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40), st.integers(1, 5))
    def test_found_repeats_agree_with_a_plain_loop(self, tokens: list[tuple[int, bool]], size: int) -> None:
        windows = [tokens[start : start + size] for start in range(len(tokens) - size + 1)]
        counts = Counter(tuple(token for token, _ in window) for window in windows if all(made for _, made in window))
        ids, generated = (
            np.array([token for token, _ in tokens], np.int32),
            np.array([made for _, made in tokens], bool),
        )
        found = [repeats_ngram(ids, generated, size, limit) for limit in range(1, 12)]
        assert found == [max(counts.values(), default=0) > limit for limit in range(1, 12)]

    def test_the_step_counts_dropped_responses(self) -> None:
        limits = {"repeated_ngram_tokens": 1, "repeated_ngram_limit": 1}
        driver = BufferDriver.start(prompts=1, rollouts=4, max_refill_groups=0, **limits)
        effects = driver.end(0, 0, 0, rewards=(0.0, 1.0, 0.0, 1.0))
        assert driver.batches[0].samples == ()
        counts = get_collected(effects).counts
        assert (counts.totals.groups_lost, counts.totals.trajectories, counts.dropped) == (1, 4, {"repeated": 4})
        assert compute_step_metrics(StepTimes(step=1, counts=counts), 1.0)["trajectories_dropped: repeated"] == 4.0

    @pytest.mark.parametrize("setting", ["repeated_ngram_tokens=1025", "repeated_ngram_limit=0", "overlong=mask"])
    def test_values_out_of_bounds_are_refused(self, setting: str) -> None:
        with pytest.raises(ConfigError, match=rf"rl\.{setting.partition('=')[0]}"):
            load_run(None, ("name=a", f"rl.{setting}"))
