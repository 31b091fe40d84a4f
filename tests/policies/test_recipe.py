"""The order of a run."""

from __future__ import annotations

import pytest

from bus.messages import (
    AnyMessage,
    BufferCursor,
    EngineJoined,
    EngineLeft,
    EvaluationFinished,
    EvaluationRequested,
    LengthCounts,
    LengthsMeasured,
    MetricsRecorded,
    ProtocolError,
    RunFinished,
    RunStarted,
    StalenessCounts,
    StepCollected,
    StepCounts,
    StepRequested,
    StepTrained,
    WeightsHeld,
    WeightsLoaded,
    WeightsPublished,
)
from policies.accounting import Recorder, counted, staleness_metrics
from policies.recipe import Recipe
from tests.policies.groups import finished

ENGINES = ("generator-0", "generator-1")


def recipe(steps: int = 2, questions: int = 5, max_staleness: int = 0) -> Recipe:
    made = Recipe(steps, questions, 1.0, ENGINES, max_staleness)
    made.decide(0.0, RunStarted(0, BufferCursor()))
    return made


def weights(version: int) -> WeightsPublished:
    return WeightsPublished(version, "/dev/shm/w", 8, "d")


def all_load(made: Recipe, version: int) -> list[AnyMessage]:
    made.decide(0.0, weights(version))
    effects = [effect for engine in ENGINES for effect in made.decide(0.0, WeightsLoaded(engine, version, 0.1))]
    return [effect.message for effect in effects if effect.to in ("head/buffer", "launcher")]


def test_new_weights_go_to_every_engine() -> None:
    effects = recipe().decide(0.0, weights(0))
    assert [effect.to for effect in effects] == list(ENGINES)


def test_a_step_begins_only_when_every_engine_holds_the_weights() -> None:
    made = recipe(questions=0)
    made.decide(0.0, weights(0))
    assert not [e for e in made.decide(0.0, WeightsLoaded("generator-0", 0, 0.1)) if e.to == "head/buffer"]
    last = made.decide(0.0, WeightsLoaded("generator-1", 0, 0.1))
    assert StepRequested(1, 0) in [effect.message for effect in last]


def test_a_run_is_evaluate_step_step_evaluate() -> None:
    made = recipe()
    assert all_load(made, 0) == [EvaluationRequested("start_sampled", 1.0, 5, 0)]
    (effect,) = made.decide(0.0, EvaluationFinished("start_sampled", 5, 1, 0, 9))
    assert effect.message == EvaluationRequested("start_greedy", 0.0, 5, 0)
    messages = [e.message for e in made.decide(0.0, EvaluationFinished("start_greedy", 5, 1, 0, 9))]
    assert messages == [StepRequested(1, 0), StepRequested(1, 0)]  # recorder and buffer
    assert all_load(made, 1) == [StepRequested(2, 1)]
    assert all_load(made, 2) == [EvaluationRequested("end_sampled", 1.0, 5, 2)]
    made.decide(0.0, EvaluationFinished("end_sampled", 5, 1, 0, 9))
    (effect,) = made.decide(0.0, EvaluationFinished("end_greedy", 5, 1, 0, 9))
    assert (effect.to, effect.message) == ("head/buffer", RunFinished(2))


def test_a_resumed_run_goes_on_without_the_first_evaluation() -> None:
    assert all_load(recipe(steps=9), 4) == [StepRequested(5, 4)]


def test_a_run_without_steps_is_its_evaluations() -> None:
    made = recipe(steps=0, questions=0)
    assert all_load(made, 0) == [RunFinished(0)]


def test_with_a_staleness_of_two_three_steps_are_collected_at_once_and_one_more_for_each_version() -> None:
    made = recipe(steps=5, questions=0, max_staleness=2)
    assert all_load(made, 0) == [StepRequested(1, 0), StepRequested(2, 0), StepRequested(3, 0)]
    assert all_load(made, 1) == [StepRequested(4, 1)]
    assert all_load(made, 2) == [StepRequested(5, 2)]
    assert all_load(made, 3) == []
    assert all_load(made, 4) == []
    assert all_load(made, 5) == [RunFinished(5)]


def test_a_version_counts_when_the_slowest_engine_holds_it() -> None:
    """The learner may be versions further by then."""
    made = recipe(steps=5, questions=0, max_staleness=1)
    all_load(made, 0)
    made.decide(0.0, weights(1))
    made.decide(0.0, weights(2))
    for version in (1, 2):
        assert not made.decide(0.0, WeightsLoaded("generator-0", version, 0.1))
    sent = [send.message for send in made.decide(0.0, WeightsLoaded("generator-1", 1, 0.1)) if send.to == "head/buffer"]
    assert sent == [StepRequested(3, 1)]
    sent = [send.message for send in made.decide(0.0, WeightsLoaded("generator-1", 2, 0.1)) if send.to == "head/buffer"]
    assert sent == [StepRequested(4, 2)]


def test_a_resumed_run_asks_again_for_all_steps_that_were_under_way() -> None:
    assert all_load(recipe(steps=9, max_staleness=1), 4) == [StepRequested(5, 4), StepRequested(6, 4)]


def test_the_last_evaluation_waits_for_the_last_weights_however_far_rollouts_ran_ahead() -> None:
    made = recipe(steps=2, max_staleness=3)
    all_load(made, 0)
    made.decide(0.0, EvaluationFinished("start_sampled", 5, 1, 0, 9))
    messages = [send.message for send in made.decide(0.0, EvaluationFinished("start_greedy", 5, 1, 0, 9))]
    assert messages[1::2] == [StepRequested(1, 0), StepRequested(2, 0)]
    assert all_load(made, 1) == []
    assert all_load(made, 2) == [EvaluationRequested("end_sampled", 1.0, 5, 2)]


def joined(engine: str, life: int) -> EngineJoined:
    return EngineJoined(engine, 1024, 16, version=-1, life=life)


def test_an_engine_that_has_left_is_not_waited_for() -> None:
    made = recipe(questions=0)
    made.decide(0.0, weights(0))
    made.decide(0.0, WeightsLoaded("generator-0", 0, 0.1))
    sent = [effect.message for effect in made.decide(0.0, EngineLeft("generator-1", "killed", 1))]
    assert StepRequested(1, 0) in sent


def test_an_engine_that_comes_back_gets_the_newest_weights_and_is_waited_for() -> None:
    made = recipe(questions=0)
    all_load(made, 0)
    made.decide(0.0, EngineLeft("generator-1", "killed", 1))
    assert [(send.to, send.message) for send in made.decide(0.0, joined("generator-1", 2))] == [
        ("generator-1", weights(0))
    ]
    assert len(made.decide(0.0, weights(1))) == 2
    assert not made.decide(0.0, WeightsLoaded("generator-0", 1, 0.1))
    assert not made.decide(0.0, WeightsLoaded("generator-1", 0, 0.1, life=2))
    assert made.decide(0.0, WeightsLoaded("generator-1", 1, 0.1, life=2))


def test_the_word_that_an_engine_joins_may_overtake_the_word_that_its_last_life_is_over() -> None:
    made = recipe(questions=0)
    all_load(made, 0)
    assert [send.to for send in made.decide(0.0, joined("generator-1", 2))] == ["generator-1"]
    made.decide(0.0, EngineLeft("generator-1", "killed", 1))
    assert made.state.engines["generator-1"].life == 2
    with pytest.raises(ProtocolError, match="over before"):
        made.decide(0.0, joined("generator-1", 1))


def test_a_further_engine_may_join_at_any_time() -> None:
    made = recipe(questions=0)
    all_load(made, 0)
    assert [send.to for send in made.decide(0.0, joined("generator-2", 1))] == ["generator-2"]


def test_a_learner_that_begins_again_says_again_what_counts_once() -> None:
    made = recipe(questions=0)
    all_load(made, 0)
    assert len(made.decide(0.0, StepTrained(1, {}))) == 1
    made.decide(0.0, weights(1))
    made.decide(0.0, WeightsLoaded("generator-0", 1, 0.1))
    assert not made.decide(0.0, StepTrained(1, {}))
    again = WeightsPublished(1, "/dev/shm/elsewhere", 8, "other")
    assert [(send.to, send.message) for send in made.decide(0.0, again)] == [("generator-1", again)]
    assert StepRequested(2, 1) in [send.message for send in made.decide(0.0, WeightsLoaded("generator-1", 1, 0.1))]


@pytest.mark.parametrize(
    "event",
    [
        WeightsLoaded("generator-0", 7, 0.1),
        WeightsLoaded("generator-0", 0, 0.1, life=2),
        WeightsLoaded("generator-7", 0, 0.1),
        weights(-1),
        EvaluationFinished("end_greedy", 1, 1, 0, 1),
    ],
)
def test_what_nobody_waits_for_is_refused(event: AnyMessage) -> None:
    made = recipe()
    made.decide(0.0, weights(0))
    made.decide(0.0, WeightsLoaded("generator-0", 0, 0.1))
    before = made.state_after(event)
    with pytest.raises(ProtocolError):
        made.decide(0.0, event)
    assert made.state_after(event) == before


def test_a_steps_phases_add_up_to_its_time() -> None:
    recorder = Recorder(steps=5)
    counts = counted(StepCounts(groups=1), finished(0, 1.0, calls=2, failed=1))
    recorder.decide(10.0, StepRequested(1, 0))
    recorder.decide(14.0, StepCollected(1, 1, counts, {"sandbox: gone": 2}, BufferCursor()))
    recorder.decide(15.5, StepTrained(1, {"loss": 0.5}))
    with pytest.raises(ProtocolError, match="step 1 was trained before"):
        recorder.decide(15.55, StepTrained(1, {"loss": 0.7}))
    line = recorder.decide(15.75, WeightsHeld(1))[0].message
    assert isinstance(line, MetricsRecorded)
    values = line.values
    assert values["rollout_s"] + values["train_s"] + values["weights_s"] == pytest.approx(values["step_s"]) == 5.75
    assert values["errors_in_positives"] == 0.5
    assert values["tokens_per_s"] == 2 / 4.0
    assert values["failed: sandbox: gone"] == 2
    assert values["loss"] == 0.5


def test_the_times_of_steps_that_overlap_are_counted_once() -> None:
    """The second step is collected while the first one is trained, and trained while the engines load."""
    recorder = Recorder(steps=5)
    for step in (1, 2):
        recorder.decide(10.0, StepRequested(step, 0))
        recorder.decide(13.0 + step, StepCollected(step, 1, StepCounts(), {}, BufferCursor(), StalenessCounts()))
    recorder.decide(16.0, StepTrained(1, {}))
    recorder.decide(17.5, StepTrained(2, {}))
    lines = [recorder.decide(at, WeightsHeld(step))[0].message for step, at in ((1, 18.0), (2, 19.0))]
    phases = [
        [line.values[f"{name}_s"] for name in ("rollout", "train", "weights", "step")]
        for line in lines
        if isinstance(line, MetricsRecorded)
    ]
    assert phases == [[4.0, 2.0, 2.0, 8.0], [0.0, 0.0, 1.0, 1.0]]


def test_staleness_is_a_mean_and_a_maximum_over_the_tokens_that_are_trained_on() -> None:
    counts = StalenessCounts(tokens=4, versions_behind=6, most_behind=2, tokens_masked=3, trajectories_dropped=1)
    assert staleness_metrics(counts) == {
        "staleness_mean": 1.5,
        "staleness_max": 2.0,
        "stale_tokens_masked": 3.0,
        "stale_trajectories_dropped": 1.0,
    }
    assert staleness_metrics(None) == {}


def test_the_length_bias_is_what_was_taken_over_all_that_was_started() -> None:
    recorder = Recorder(steps=5)
    measured = LengthsMeasured(3, LengthCounts(4, 40, 0), LengthCounts(8, 160, 2), aborted=3, late=1)
    (send,) = recorder.decide(0.0, measured)
    line = send.message
    assert isinstance(line, MetricsRecorded)
    assert (line.kind, line.step) == ("lengths", 3)
    assert line.values["length_bias"] == 0.5
    assert (line.values["taken_overlong_share"], line.values["started_overlong_share"]) == (0.0, 0.25)
    assert (line.values["aborted_trajectories"], line.values["late_trajectories"]) == (3.0, 1.0)


def test_a_step_that_nobody_asked_for_is_not_recorded() -> None:
    recorder = Recorder(steps=5)
    with pytest.raises(ProtocolError, match="step 2 was not requested"):
        recorder.decide(0.0, StepCollected(2, 1, StepCounts(), {}, BufferCursor()))


def test_an_evaluations_accuracy_leaves_out_what_infrastructure_lost() -> None:
    recorder = Recorder(steps=5)
    line = recorder.decide(0.0, EvaluationFinished("start_greedy", 10, 4, 2, 80))[0].message
    assert isinstance(line, MetricsRecorded)
    assert line.values["accuracy"] == 0.5
    assert line.values["response_tokens"] == 10.0
