"""Ranks the causes of health checks that trigger together: a cause with evidence in the metrics comes first.

For example, a diverged policy reaches the length limit and gives groups equal rewards. More response tokens or easier
questions would not help. The fall of the reward is the evidence of the divergence.
"""

from collections.abc import Collection
from typing import NamedTuple

from msgspec.structs import replace

from asterism.configs.schema.health import HealthConfig
from asterism.policies.health.health_checks import HEALTH_CHECKS
from asterism.policies.health.step_history import StepHistory

_NOISE_FACTOR = 3.0  # least fall of the reward, as a multiple of its median change between two steps
_NEWEST_STEPS = 2  # steps in the newest mean reward; checks average more steps, and so report later


class RankedCause(NamedTuple):
    name: str
    cause: str
    change: str


# Checks that a diverged policy can trigger.
_BY_DIVERGENCE = {
    *("length_limit", "tool_errors", "entropy", "gradient_norm", "clipping", "equal_groups", "skipped_updates"),
    *("no_updates", "reward_drop"),
}
# Checks that failed trajectories and calls without a result can trigger.
_BY_FAILURES = {"masked_trajectories", "equal_groups", "no_updates", "reward_drop", "tool_errors"}
# Checks that the stale tokens of an engine without the published weights can trigger.
_BY_LOST_WEIGHTS = {"mismatch", "confident_tokens", "clipping", "gradient_norm", "reward_drop"}
_EVIDENT_CAUSES = {"weight_sync": _BY_LOST_WEIGHTS, "masked_trajectories": _BY_FAILURES, "tool_timeouts": _BY_FAILURES}


def rank_causes(history: StepHistory, health: HealthConfig, active: Collection[str]) -> list[RankedCause]:
    """Return the causes of the checks in `active`, which have found a problem, with the most likely cause first."""
    newest = replace(health, window_steps=1)  # a symptom can trigger before the check of its cause
    causes = [
        _get_usual_cause(name)
        for name, symptoms in _EVIDENT_CAUSES.items()
        if {*symptoms, name} & set(active) and (name in active or HEALTH_CHECKS[name].measure(history, newest))
    ]
    if not causes and _BY_DIVERGENCE & set(active) and (evidence := find_divergence(history, health)):
        causes.append(evidence)
    known = {each.name for each in causes}
    return [*causes, *(_get_usual_cause(name) for name in HEALTH_CHECKS if name in active and name not in known)]


def find_divergence(history: StepHistory, health: HealthConfig) -> RankedCause | None:
    """Return the cause "divergence" if the newest rewards are far below the first or the best rewards."""
    rewards = history.list_newest("reward", 1) and history.list_values("reward")[-_NEWEST_STEPS:]
    known = [each for each in (history.find_reference_reward(), history.best_reward) if each is not None]
    if not rewards or not known or history.num_steps <= len(rewards):
        return None
    best, newest = max(known), sum(rewards) / len(rewards)
    limit = max(health.reward_drop_share * abs(best), _NOISE_FACTOR * history.compute_noise("reward"))
    if best - newest <= limit:
        return None
    rate = history.list_values("lr")[-1:]
    present = f" (now {rate[0]:.2g})" if rate else ""
    return RankedCause(
        "divergence",
        f"the policy has diverged after too large updates: the reward fell from {best:.3g} to {newest:.3g}",
        f"lower learner.optimizer.lr{present}, and start again from a checkpoint from before",
    )


def _get_usual_cause(name: str) -> RankedCause:
    check = HEALTH_CHECKS[name]
    return RankedCause(name, check.cause, check.change)
