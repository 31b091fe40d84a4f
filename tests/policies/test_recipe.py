"""The recipe's order of steps, evaluations and weights in a run."""

import pytest
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.bus.addresses import BUFFER
from asterism.configs.schema.algorithm import GREEDY, Sampling
from asterism.configs.schema.success import SuccessRule
from asterism.policies.decider import Send
from asterism.policies.groups.counts import add_trajectory
from asterism.policies.recorder import Recorder
from asterism.policies.step_evaluations import EvaluationPlan
from asterism.policies.step_metrics import compute_staleness_metrics
from tests.fakes import evaluated, start_group
from tests.policies.groups.finished import finished
from tests.policies.health.histories import list_step_events
from tests.policies.recipes import RecipeDriver, joined, loaded, weights


def recipe(steps: int = 2, questions: int = 5, max_staleness: int = 0) -> RecipeDriver:
    return RecipeDriver(EvaluationPlan(steps, questions, (0,)), max_staleness)


def test_a_step_begins_only_when_every_engine_holds_the_weights() -> None:
    decider = recipe(questions=0)
    assert not [send for send in decider.decide(weights(0), loaded(0, 0)) if send.to == BUFFER]
    assert Send(BUFFER, msg.StepRequested(1, 0)) in decider.decide(loaded(1, 0))


def test_a_run_has_its_evaluations_before_and_after_its_steps() -> None:
    decider = recipe()
    assert decider.publish(0) == [msg.EvaluationRequested("start_sampled", Sampling(), 5, 0)]
    requested = msg.EvaluationRequested("start_greedy", GREEDY, 5, 0)
    assert decider.decide(evaluated("start_sampled")) == [Send(BUFFER, requested)]
    messages = [e.message for e in decider.decide(evaluated("start_greedy"))]
    assert messages == [msg.StepRequested(1, 0), msg.StepRequested(1, 0)]  # to the recorder and the buffer
    assert decider.publish(1) == [msg.StepRequested(2, 1)]
    assert decider.publish(2) == [msg.EvaluationRequested("end_sampled", Sampling(), 5, 2)]
    decider.decide(evaluated("end_sampled"))
    assert decider.decide(evaluated("end_greedy")) == [Send(BUFFER, msg.RunFinished(2))]


@pytest.mark.parametrize(
    ("settings", "version", "messages"),
    [
        ({"steps": 9}, 4, [msg.StepRequested(5, 4)]),
        ({"steps": 9, "max_staleness": 1}, 4, [msg.StepRequested(5, 4), msg.StepRequested(6, 4)]),
        ({"steps": 0, "questions": 0}, 0, [msg.RunFinished(0)]),
    ],
    ids=["resumed", "resumed_with_steps_in_flight", "without_steps"],
)
def test_a_run_starts_at_the_version_of_its_weights(
    settings: dict[str, int], version: int, messages: list[msg.AnyMessage]
) -> None:
    assert recipe(**settings).publish(version) == messages


def test_a_staleness_of_two_allows_three_concurrent_steps() -> None:
    decider = recipe(steps=5, questions=0, max_staleness=2)
    assert decider.publish(0) == [msg.StepRequested(1, 0), msg.StepRequested(2, 0), msg.StepRequested(3, 0)]
    assert decider.publish(1) == [msg.StepRequested(4, 1)]
    assert decider.publish(2) == [msg.StepRequested(5, 2)]
    assert decider.publish(3) == []
    assert decider.publish(4) == []
    assert decider.publish(5) == [msg.RunFinished(5)]


def test_a_version_counts_when_the_slowest_engine_has_loaded_it() -> None:
    """The learner can have published later versions by then."""
    decider = recipe(steps=5, questions=0, max_staleness=1)
    decider.publish(0)
    decider.decide(weights(1), weights(2))
    for version in (1, 2):
        assert not decider.decide(loaded(0, version))
    for version in (1, 2):
        sent = [each.message for each in decider.decide(loaded(1, version)) if each.to == BUFFER]
        assert sent == [msg.StepRequested(version + 2, version)]


def test_the_last_evaluation_waits_for_the_last_weights() -> None:
    decider = recipe(steps=2, max_staleness=3)
    decider.publish(0)
    decider.decide(evaluated("start_sampled"))
    messages = [send.message for send in decider.decide(evaluated("start_greedy"))]
    assert messages[1::2] == [msg.StepRequested(1, 0), msg.StepRequested(2, 0)]
    assert decider.publish(1) == []
    assert decider.publish(2) == [msg.EvaluationRequested("end_sampled", Sampling(), 5, 2)]


def test_the_run_does_not_wait_for_an_engine_that_has_left() -> None:
    decider = recipe(questions=0)
    sent = decider.decide(weights(0), loaded(0, 0), msg.EngineLeft("generator-1", "killed", 1))
    assert Send(BUFFER, msg.StepRequested(1, 0)) in sent


def test_the_run_waits_until_a_rejoined_engine_has_the_newest_weights() -> None:
    decider = recipe(questions=0)
    decider.publish(0)
    sent = decider.decide(msg.EngineLeft("generator-1", "killed", 1), joined(1, 2))
    assert sent == [Send("generator-1", weights(0, incarnation=2))]
    sent = decider.decide(weights(1))
    assert sent == [Send("generator-0", weights(1, incarnation=1)), Send("generator-1", weights(1, incarnation=2))]
    assert not decider.decide(loaded(0, 1))
    assert not decider.decide(loaded(1, 0, 2))
    assert decider.decide(loaded(1, 1, 2))


def test_a_join_can_arrive_before_the_departure_of_the_previous_incarnation() -> None:
    decider = recipe(questions=0)
    decider.publish(0)
    assert [send.to for send in decider.decide(joined(1, 2))] == ["generator-1"]
    decider.decide(msg.EngineLeft("generator-1", "killed", 1))
    assert decider.recipe.state.engines["generator-1"].incarnation == 2
    with pytest.raises(msg.ProtocolError, match="had already left"):
        decider.decide(joined(1, 1))


def test_a_further_engine_can_join_at_any_time() -> None:
    decider = recipe(questions=0)
    decider.publish(0)
    assert [send.to for send in decider.decide(joined(2, 1))] == ["generator-2"]


def test_repeated_messages_of_a_restarted_learner_count_once() -> None:
    decider = recipe(questions=0)
    decider.publish(0)
    assert len(decider.decide(msg.StepTrained(1, {}))) == 1
    decider.decide(weights(1))
    decider.decide(loaded(0, 1))
    assert not decider.decide(msg.StepTrained(1, {}))
    again = replace(weights(1), path="/dev/shm/elsewhere")
    assert decider.decide(again) == [Send("generator-1", replace(again, incarnation=1))]
    assert Send(BUFFER, msg.StepRequested(2, 1)) in decider.decide(loaded(1, 1))


def test_a_version_that_was_trained_again_with_other_bits_is_sent_to_every_engine() -> None:
    decider = recipe(questions=0)
    decider.publish(0)
    decider.decide(weights(1), loaded(0, 1))
    again = replace(weights(1), digest="other")
    assert [send.to for send in decider.decide(again)] == ["generator-0", "generator-1"]
    assert not decider.decide(loaded(1, 1))
    assert Send(BUFFER, msg.StepRequested(2, 1)) in decider.decide(loaded(0, 1))


@pytest.mark.parametrize("event", [loaded(0, 7), loaded(0, 0, 2), loaded(7, 0), weights(-1), evaluated("end_greedy")])
def test_unexpected_messages_are_refused(event: msg.AnyMessage) -> None:
    decider = recipe()
    decider.decide(weights(0), loaded(0, 0))
    before = decider.recipe.get_state_after(event)
    with pytest.raises(msg.ProtocolError):
        decider.decide(event)
    assert decider.recipe.get_state_after(event) == before


def record(recorder: Recorder, now: float, event: msg.AnyMessage) -> msg.MetricsRecorded:
    """Decide the event, and return the metrics that the recorder sends."""
    (send, *_) = recorder.decide(now, event)
    assert isinstance(send.message, msg.MetricsRecorded)
    return send.message


def test_each_component_of_a_reward_is_averaged_over_the_trajectories_that_have_it() -> None:
    recorder, counts = Recorder(steps=1), msg.StepCounts()
    for number, (reward, components) in enumerate(
        [(0.75, {"tests": 0.5, "style": 0.25}), (0.0, {}), (0.3, {"tests": 0.1, "style": 0.2}), (-0.5, {"style": -0.5})]
    ):
        trajectory = finished(number, reward, components=components)
        counts = add_trajectory(counts, start_group(), trajectory, SuccessRule(limit=0.25))
    *events, synced = list_step_events(1, counts)
    for event in events:
        recorder.decide(0.0, event)
    values = record(recorder, 1.0, synced).values
    found = {
        name: values[name] for name in ("reward", "reward: tests", "reward: style", "positive_share", "ended: answered")
    }
    assert found == {
        "reward": 0.1375,
        "reward: tests": 0.3,
        "reward: style": pytest.approx(-0.05 / 3),
        "positive_share": 0.5,
        "ended: answered": 4.0,
    }


def test_the_phases_of_a_step_add_up_to_its_time() -> None:
    recorder = Recorder(steps=5)
    counts = add_trajectory(msg.StepCounts(), start_group(), finished(0, 1.0, calls=2, failed=1), SuccessRule())
    recorder.decide(10.0, msg.StepRequested(1, 0))
    recorder.decide(14.0, msg.StepCollected(1, 1, counts, {"sandbox: gone": 2}, msg.BufferCursor()))
    recorder.decide(15.5, msg.StepTrained(1, {"loss": 0.5}))
    with pytest.raises(msg.ProtocolError, match="step 1 was already trained"):
        recorder.decide(15.55, msg.StepTrained(1, {"loss": 0.7}))
    values = record(recorder, 15.75, msg.WeightsSynced(1)).values
    assert values["rollout_s"] + values["train_s"] + values["weights_s"] == pytest.approx(values["step_s"]) == 5.75
    assert values["errors_in_positives"] == 0.5
    assert values["tokens_per_s"] == 2 / 4.0
    assert values["failed: sandbox: gone"] == 2
    assert values["loss"] == 0.5


def test_overlapping_steps_are_counted_once() -> None:
    """Step 2 is collected while step 1 is trained, and trained while the engines load weights."""
    recorder = Recorder(steps=5)
    for step in (1, 2):
        recorder.decide(10.0, msg.StepRequested(step, 0))
        recorder.decide(
            13.0 + step, msg.StepCollected(step, 1, msg.StepCounts(), {}, msg.BufferCursor(), msg.StalenessCounts())
        )
    recorder.decide(16.0, msg.StepTrained(1, {}))
    recorder.decide(17.5, msg.StepTrained(2, {}))
    lines = [record(recorder, at, msg.WeightsSynced(step)) for step, at in ((1, 18.0), (2, 19.0))]
    phases = [[line.values[f"{name}_s"] for name in ("rollout", "train", "weights", "step")] for line in lines]
    assert phases == [[4.0, 2.0, 2.0, 8.0], [0.0, 0.0, 1.0, 1.0]]


def test_staleness_metrics_are_mean_and_maximum_over_training_tokens() -> None:
    counts = msg.StalenessCounts(
        tokens=4, versions_behind=6, max_versions_behind=2, tokens_masked=3, trajectories_dropped=1
    )
    assert compute_staleness_metrics(counts) == {
        "staleness_mean": 1.5,
        "staleness_max": 2.0,
        "stale_tokens_masked": 3.0,
        "stale_trajectories_dropped": 1.0,
    }
    assert compute_staleness_metrics(None) == {}


def test_the_length_bias_compares_the_mean_lengths_of_taken_and_started_trajectories() -> None:
    recorder = Recorder(steps=5)
    measured = msg.LengthsMeasured(
        3, msg.LengthCounts(4, 40, 0), msg.LengthCounts(8, 160, 2), aborted=3, finished_late=1
    )
    line = record(recorder, 0.0, measured)
    assert (line.kind, line.step) == ("lengths", 3)
    assert line.values["length_bias"] == 0.5
    assert (line.values["taken_overlong_share"], line.values["started_overlong_share"]) == (0.0, 0.25)
    assert (line.values["aborted_trajectories"], line.values["late_trajectories"]) == (3.0, 1.0)


def test_an_unrequested_step_is_not_recorded() -> None:
    recorder = Recorder(steps=5)
    with pytest.raises(msg.ProtocolError, match="step 2 was not requested"):
        recorder.decide(0.0, msg.StepCollected(2, 1, msg.StepCounts(), {}, msg.BufferCursor()))


def test_evaluation_accuracy_excludes_infrastructure_failures() -> None:
    recorder = Recorder(steps=5)
    totals = msg.TaskCounts(trajectories=8, trajectories_failed=2, positives=4, response_tokens=80)
    line = record(recorder, 0.0, evaluated("start_greedy", totals=totals))
    assert line.values["accuracy"] == 0.5
    assert line.values["response_tokens"] == 10.0


def test_an_evaluation_has_its_version_and_the_figures_of_each_set() -> None:
    recorder = Recorder(steps=5)
    sets = {"easy": msg.TaskCounts(trajectories=4, trajectories_failed=1, positives=1, reward=0.5, response_tokens=8)}
    line = record(recorder, 0.0, evaluated("step_sampled", 4, sets=sets))
    assert (line.step, line.label) == (4, "step_sampled")
    assert (line.values["version"], line.values["other_version_tokens"]) == (4.0, 0.0)
    assert {name: value for name, value in line.values.items() if name.startswith("set ")} == {
        "set easy: accuracy": 0.25,
        "set easy: reward": 0.125,
        "set easy: questions": 5.0,
        "set easy: failed": 1.0,
        "set easy: response_tokens": 2.0,
    }


def test_an_evaluation_without_any_result_has_no_accuracy() -> None:
    line = record(Recorder(steps=5), 0.0, evaluated("start_greedy", totals=msg.TaskCounts(trajectories_failed=10)))
    assert line.values == {"questions": 10.0, "failed": 10.0, "version": 0.0, "other_version_tokens": 0.0}
