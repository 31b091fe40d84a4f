"""The group buffer judges each complete group once, and loses no trajectory."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.configs.schema.algorithm import (
    GREEDY,
    EvaluationConfig,
    EvaluationSetConfig,
    RlConfig,
    RocConfig,
    Sampling,
)
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Send
from asterism.policies.groups.group_starter import ProblemSet, TokenizedProblem
from tests.batches import CompleteBatch
from tests.policies.groups.buffers import BufferDriver, get_collected, list_starts, make_finished
from tests.policies.groups.finished import finished

RUN = RunConfig(name="test", seed=3, rl=RlConfig(prompts=2, rollouts=4, max_refill_groups=1))
TRAIN = [TokenizedProblem(f"train:{number}", str(number), bytes(8)) for number in range(5)]
TEST = [TokenizedProblem(f"test:{number}", str(number), bytes(8)) for number in range(3)]


def make_driver(run: RunConfig = RUN, test: ProblemSet | None = None) -> BufferDriver:
    return BufferDriver(run, TRAIN, test or ProblemSet.of_one_task(TEST))


def collect_step(driver: BufferDriver, *rewards: Sequence[float | None]) -> list[Send]:
    """Start step 1 and end its groups, which have these rewards. Return the effects of the ends."""
    driver.request_step(1)
    return [send for group, each in enumerate(rewards) for send in driver.end(group, 0, rewards=each)]


def get_failure(effects: list[Send]) -> str:
    (failure,) = [effect.message for effect in effects if isinstance(effect.message, msg.RunFailed)]
    return failure.cause


def test_a_step_starts_one_group_of_2g_trajectories_for_each_group_of_its_batch() -> None:
    groups = make_driver().start_step(1)
    assert [group.size for group in groups] == [4, 4]
    assert [group.first_trajectory_id for group in groups] == [0, 4]
    assert groups[0].seed != groups[1].seed


def test_the_learner_receives_resampled_mixed_groups_with_advantages() -> None:
    driver = make_driver()
    effects = collect_step(driver, [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0])
    rows = driver.batches[0].samples
    assert [row.group_id for row in rows] == [0, 0, 1, 1]
    assert [row.advantage for row in rows] == pytest.approx([2**-0.5, -(2**-0.5)] * 2, abs=1e-5) or sorted(
        row.advantage for row in rows
    ) == pytest.approx([-(2**-0.5)] * 2 + [2**-0.5] * 2, abs=1e-5)
    assert get_collected(effects).counts.totals.groups == 2


def test_plain_grpo_trains_on_the_whole_group() -> None:
    driver = make_driver(replace(RUN, roc=RocConfig(enabled=False)))
    collect_step(driver, [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0])
    assert len(driver.batches[0].samples) == 8


def test_equal_rewards_are_rejected_and_refilled_up_to_the_limit() -> None:
    driver = make_driver()
    first, second = driver.start_step(1)
    (third,) = list_starts(driver.end(0, 0, rewards=[1.0] * 4))
    assert third.problem not in {first.problem, second.problem}
    assert not list_starts(driver.end(1, 0, rewards=[0.0] * 4))  # the step has used its only refill
    effects = driver.end(2, 0, rewards=[1.0, 0.0, 1.0, 0.0])
    assert {row.group_id for row in driver.batches[0].samples} == {2}
    assert get_collected(effects).counts.totals.groups_rejected == 2


def test_a_step_with_only_rejected_groups_ends() -> None:
    driver = make_driver(replace(RUN, rl=replace(RUN.rl, max_refill_groups=0)))
    collect_step(driver, [1.0] * 4, [0.0] * 4)
    assert driver.batches[0].samples == ()


def test_infrastructure_failures_are_excluded_and_counted_by_cause() -> None:
    driver = make_driver()
    step = get_collected(collect_step(driver, [1.0, None, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]))
    totals = step.counts.totals
    assert (totals.trajectories, totals.trajectories_failed, totals.positives) == (7, 1, 3)
    assert step.failures == {"sandbox": 1}


def test_a_step_without_any_result_fails_the_run_with_the_first_cause() -> None:
    driver = make_driver(replace(RUN, rl=replace(RUN.rl, max_refill_groups=0)))
    effects = collect_step(driver, [None] * 4, [None] * 4)
    assert get_failure(effects) == "every trajectory of step 1 failed, 8 in all. The first: sandbox: gone"
    assert not [effect for effect in effects if isinstance(effect.message, msg.BatchReady)]


def test_an_evaluation_without_any_result_fails_the_run_with_the_first_cause() -> None:
    driver = make_driver()
    driver.start_evaluation(2, GREEDY, "end_greedy")
    driver.end(0, 0, rewards=[None])
    failure = get_failure(driver.end(1, 0, rewards=[None]))
    assert failure == "every trajectory of evaluation end_greedy failed, 2 in all. The first: sandbox: gone"


def test_a_trajectory_that_ends_twice_is_refused() -> None:
    driver = make_driver()
    driver.request_step(1)
    driver.decide(finished(0, 1.0))
    for again in (finished(0, 1.0), msg.TrajectoryFailed(0, 0, "late")):
        with pytest.raises(msg.ProtocolError, match="ended twice"):
            driver.decide(again)


def test_a_step_does_not_start_before_the_end_of_the_previous_step() -> None:
    driver = make_driver()
    driver.request_step(1)
    with pytest.raises(msg.ProtocolError):
        driver.request_step(2, 1)


def test_a_resumed_buffer_continues_where_the_step_ended() -> None:
    whole, resumed = make_driver(), make_driver()
    effects = collect_step(whole, *[[1.0, 0.0, 1.0, 0.0]] * 2)
    resumed.decide(msg.RunStarted(1, get_collected(effects).cursor))
    request = msg.StepRequested(2, 1)
    assert resumed.buffer.decide(9.0, request) == whole.buffer.decide(5.0, request)


def test_an_evaluation_starts_each_question_once_and_excludes_failures() -> None:
    driver = make_driver()
    groups = driver.start_evaluation(2, GREEDY, "start_greedy")
    assert [group.problem for group in groups] == ["test:0", "test:1"]
    assert {group.purpose for group in groups} == {"evaluate"}
    driver.end(0, 0, rewards=[1.0])
    effects = driver.end(1, 0, rewards=[None])
    assert isinstance(effects[0].message, msg.FailureReported)
    answer = effects[1].message
    assert isinstance(answer, msg.EvaluationFinished)
    assert (answer.totals.ended, answer.totals.positives, answer.totals.trajectories_failed) == (2, 1, 1)


def test_the_first_failure_of_each_kind_is_reported_with_its_row() -> None:
    driver = make_driver()
    first, second = driver.start_step(1)[:2]
    causes = (
        *("reward: f raised KeyError: 'a 1'\nin line 7", "reward: f raised KeyError: 'b 22'", "executor-0 died"),
        *("reward: f raised KeyError: 'c 3'", "executor-1 died", "reward: g raised KeyError: 'a 1'"),
    )
    reports: list[msg.FailureReported] = []
    for number, cause in enumerate(causes):
        group = first if number < 3 else second
        failed = msg.TrajectoryFailed(group.first_trajectory_id + number % 3, group.group_id, cause)
        sends = driver.decide(failed)
        reports += [send.message for send in sends if isinstance(send.message, msg.FailureReported)]
    assert [(each.step, each.problem, each.cause) for each in reports] == [
        (1, first.problem, causes[0]),
        (1, first.problem, causes[2]),
        (1, second.problem, causes[5]),
    ]


def test_an_evaluation_runs_alongside_a_step_and_counts_only_its_own_trajectories() -> None:
    driver = make_driver()
    sampling = Sampling(temperature=0.6, top_p=0.9, top_k=20)
    questions = driver.start_evaluation(2, sampling, version=3)
    assert {each.sampling for each in questions} == {sampling}
    groups = driver.start_step(1)
    assert {each.sampling for each in groups} == {Sampling()}
    driver.end(2, 0, rewards=[1.0, 0.0, 1.0, 0.0])
    driver.end(0, 0, rewards=[1.0])
    collected = get_collected(driver.end(3, 0, rewards=[1.0, 0.0, 1.0, 0.0]))
    assert collected.counts.totals.trajectories == 8
    answer = driver.end(1, 0, rewards=[0.0])[0].message
    assert isinstance(answer, msg.EvaluationFinished)
    assert (answer.totals.ended, answer.totals.positives, answer.version) == (2, 1, 3)
    assert answer.first_group_id == questions[0].group_id


def test_two_evaluations_do_not_overlap() -> None:
    driver = make_driver()
    driver.start_evaluation(2, version=1)
    with pytest.raises(msg.ProtocolError, match="still being collected"):
        driver.start_evaluation(2, version=2)


def test_an_evaluation_counts_tokens_that_other_weights_generated() -> None:
    driver = make_driver()
    (group,) = driver.start_evaluation(1, version=2)
    effects = driver.decide(make_finished(0, 2, 2, 3, group_id=group.group_id))
    answer = effects[0].message
    assert isinstance(answer, msg.EvaluationFinished)
    assert (answer.version, answer.other_version_tokens) == (2, 1)


def test_an_evaluation_counts_each_set_by_its_name_and_limit() -> None:
    options = EvaluationConfig(
        sets=(
            EvaluationSetConfig(name="easy", data="easy.jsonl"),
            EvaluationSetConfig(name="hard", data="hard.jsonl", questions=1),
        )
    )
    easy, hard = ([replace(problem, evaluation_set=name) for problem in TEST] for name in ("easy", "hard"))
    test = ProblemSet([*easy, *hard], (3, 3))
    driver = make_driver(replace(RUN, evaluation=options), test)
    groups = driver.start_evaluation(2)
    assert [(group.evaluation_set, group.problem) for group in groups] == [
        ("easy", "test:0"),
        ("easy", "test:1"),
        ("hard", "test:0"),
    ]
    driver.end(0, 0, rewards=[1.0])
    driver.end(2, 0, rewards=[0.5])
    answer = driver.end(1, 0, rewards=[None])[-2].message
    assert isinstance(answer, msg.EvaluationFinished)
    found = {
        name: (counts.trajectories, counts.trajectories_failed, counts.reward) for name, counts in answer.sets.items()
    }
    assert found == {"easy": (1, 1, 1.0), "hard": (1, 0, 0.5)}


def test_an_evaluation_uses_no_training_problem() -> None:
    driver = make_driver()
    before = driver.buffer.state.cursor.position
    driver.start_evaluation(3, GREEDY, "start_greedy")
    assert driver.buffer.state.cursor.position == before


@pytest.mark.slow
@given(st.data())
def test_every_step_ends_and_its_counts_add_up(data: st.DataObject) -> None:
    run = replace(RUN, rl=RlConfig(prompts=3, rollouts=4, max_refill_groups=data.draw(st.integers(0, 3))))
    driver = make_driver(run)
    driver.decide(msg.RunStarted(0, msg.BufferCursor()))
    pending = [(group, place) for group in driver.start_step(1) for place in range(group.size)]
    started, effects, judged = len(pending), list[Send](), list[msg.GroupJudged]()
    while pending:
        group, place = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
        tid, outcome = group.first_trajectory_id + place, data.draw(st.sampled_from([0.0, 1.0, None]))
        event = (
            msg.TrajectoryFailed(tid, group.group_id, "x")
            if outcome is None
            else finished(tid, outcome, group_id=group.group_id)
        )
        effects = driver.decide(event)
        judged += [effect.message for effect in effects if isinstance(effect.message, msg.GroupJudged)]
        for refill in list_starts(effects):
            started += refill.size
            pending += [(refill, place) for place in range(refill.size)]
    counts, rows = get_collected(effects).counts.totals, driver.batches[0].samples
    assert counts.ended == started
    assert counts.groups * 4 == started
    accepted = counts.groups - counts.groups_rejected - counts.groups_lost
    assert len({row.group_id for row in rows}) == accepted <= 3
    assert len(rows) == 2 * accepted
    assert Counter(each.verdict for each in judged) == Counter(
        accepted=accepted, rejected=counts.groups_rejected, lost=counts.groups_lost
    )
    judged.sort(key=lambda each: each.group_id)
    kept = [pair for each in judged for pair in zip(each.kept, each.advantages, strict=True)]
    assert kept == [(row.trajectory_id, row.advantage) for row in rows]
    assert not driver.buffer.state.steps


REWARDS = st.sampled_from([0.0, 1.0])


@pytest.mark.slow
@given(
    st.lists(st.tuples(REWARDS, REWARDS, REWARDS, REWARDS), min_size=6, max_size=6),
    st.lists(st.integers(0, 2**16), min_size=24, max_size=24),
)
def test_the_order_of_endings_does_not_change_a_batch(rewards: list[tuple[float, ...]], picks: list[int]) -> None:
    """The step has at most six problems: two groups and four refills."""
    run = replace(RUN, rl=RlConfig(prompts=2, rollouts=4, max_refill_groups=4))
    in_turn, drawn = (_collected_in_order(make_driver(run), rewards, order) for order in ([0] * 24, picks))
    assert drawn == in_turn


def _collected_in_order(
    driver: BufferDriver, rewards: list[tuple[float, ...]], picks: list[int]
) -> tuple[list[msg.StartGroup], list[CompleteBatch], msg.StepCollected]:
    """End live trajectories in the order of `picks`; rewards depend on the group's index."""
    living: list[tuple[int, int, float]] = []  # trajectory id, group id, reward
    effects = driver.request_step(1)
    for pick in picks:
        for group in list_starts(effects):
            ids = range(group.first_trajectory_id, group.first_trajectory_id + group.size)
            living += [(tid, group.group_id, reward) for tid, reward in zip(ids, rewards[group.group_id], strict=True)]
        tid, group_id, reward = living.pop(pick % len(living))
        effects = driver.decide(finished(tid, reward, group_id=group_id))
        if driver.batches:
            assert not living
            return list(driver.groups.values()), driver.batches, get_collected(effects)
    raise AssertionError("the step never ended")
