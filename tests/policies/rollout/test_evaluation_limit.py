"""An evaluation can have a separate length limit; its other rules equal those of training."""

import pytest
from msgspec.structs import replace

from asterism.bus.messages import LeaseGranted, LeaseRequested, StartGroup, TrajectoryFinished, TurnRequested
from asterism.policies.rollout.rollout import Rollout
from tests.fakes import generated, rules, start_group
from tests.policies.rollout.conversations import find

TRAINING = start_group(1, 0)
EVALUATION = replace(TRAINING, purpose="evaluate")


def generate_to_the_limit(rollout: Rollout, group: StartGroup) -> tuple[int, TrajectoryFinished]:
    """Return the limit in a lease request, and the end of a trajectory that generates up to the limit."""
    requested = find(list(rollout.decide(1.0, group)), LeaseRequested)
    granted = LeaseGranted(0, "generator-0", 4000, 1, 0.0, "")
    limit = find(list(rollout.decide(2.0, granted)), TurnRequested).max_new_tokens
    assert requested.max_new_tokens == limit
    ends = rollout.decide(3.0, generated(0, 0, "x" * limit, finish="length"))
    return limit, find(list(ends), TrajectoryFinished)


@pytest.mark.parametrize(("limit", "expected"), [(0, 40), (70, 70), (20, 20)])
def test_the_limit_of_evaluations_applies_only_to_evaluations(limit: int, expected: int) -> None:
    for group, tokens in ((TRAINING, 40), (EVALUATION, expected)):
        rollout = Rollout({"": rules(response_tokens=40, evaluated_response_tokens=limit)})
        found, end = generate_to_the_limit(rollout, group)
        assert (found, end.record.response_tokens, end.ending) == (tokens, tokens, "length")


def test_rules_of_evaluations_differ_only_in_the_limit() -> None:
    own = rules(response_tokens=40, evaluated_response_tokens=70, max_turns=3)
    assert own.of_evaluations == replace(own, response_tokens=70)
    same = replace(own, evaluated_response_tokens=0)
    assert same.of_evaluations == same
