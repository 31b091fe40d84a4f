"""The table of health checks. Each check measures the last steps and returns its numbers if they exceed the limit.

A metric that the newest step lacks, such as the loss of a step without rows, triggers no check. Only `mismatch` and
`skipped_updates` react to values that are not finite.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from asterism.configs.schema.health import HealthConfig
from asterism.policies.health.evaluation_drop import find_drop
from asterism.policies.health.step_history import FAILURE_PREFIX, TOOL_PREFIX, StepHistory, is_finite, sum_finite
from asterism.policies.health.weight_probes import UNMOVED_BELOW

MIN_STEPS_BEFORE_SPIKE = 5
REWARD_NOISE_FACTOR = 4.0  # least drop of the reward, as a multiple of its median change between two steps

Measure = Callable[[StepHistory, HealthConfig], str | None]


class HealthCheck(NamedTuple):
    measure: Measure  # returns the numbers of an unhealthy history as a sentence without a full stop, or None
    cause: str  # the usual cause
    change: str  # the remedy, with configuration keys


def _find_mean_above(history: StepHistory, name: str, limit: float, health: HealthConfig) -> float | None:
    """Return the mean of the window, or None if a value of the window does not exceed the limit."""
    values = history.list_newest(name, health.window_steps)
    return statistics.fmean(values) if values and min(values) > limit else None


def _find_unsolved_share(history: StepHistory, health: HealthConfig) -> float | None:
    """Return the share of positives, or None if the share is unknown or at least `solved_share`."""
    share = history.compute_mean("positive_share", health.window_steps)
    return share if share is not None and share < health.solved_share else None


def measure_length_limit(history: StepHistory, health: HealthConfig) -> str | None:
    limit, steps = 2 * health.length_limit_share, health.window_steps
    mean = _find_mean_above(history, "overlong_share", limit, health)
    if mean is None:
        limit, steps = health.length_limit_share, health.length_limit_steps
        mean = history.compute_mean("overlong_share", steps)
    if mean is None or mean <= limit:
        return None
    return f"{mean:.0%} of the trajectories of the last {steps} steps reach the length limit (limit {limit:.0%})"


def measure_tool_errors(history: StepHistory, health: HealthConfig) -> str | None:
    lowest, limit = history.lowest_tool_errors, health.tool_errors_rise
    if lowest is None:
        return None
    if (mean := _find_mean_above(history, "errors_in_positives", lowest + limit, health)) is None:
        return _measure_many_tool_errors(history, health)
    return (
        f"{mean:.0%} of the calls in positives of the last {health.window_steps} steps fail, and {lowest:.0%} did at "
        f"best (limit {limit:.0%} more)"
    )


def _measure_many_tool_errors(history: StepHistory, health: HealthConfig) -> str | None:
    """Find a share of failed calls that is above its limit in all newest steps, as in plain GRPO."""
    limit, steps = health.tool_errors_share, health.tool_errors_steps
    values = history.list_newest("errors_in_positives", steps)
    if not values or min(values) <= limit:
        return None
    return (
        f"{statistics.fmean(values):.0%} of the calls in positives of the last {steps} steps fail (limit {limit:.0%})"
    )


def measure_tool_timeouts(history: StepHistory, health: HealthConfig) -> str | None:
    shares = {name: _list_timeout_shares(history, name, health.window_steps) for name in history.list_tools()}
    limit = health.tool_timeouts_share
    found = {name: statistics.fmean(each) for name, each in shares.items() if each and min(each) > limit}
    if not found:
        return None
    parts = ", ".join(f"{share:.0%} of the calls of {name}" for name, share in found.items())
    return f"{parts} in the last {health.window_steps} steps end at their time limit (limit {limit:.0%})"


def _list_timeout_shares(history: StepHistory, tool: str, steps: int) -> list[float]:
    """Return the shares of the newest steps, or no share if one of the steps has no call of the tool."""
    newest = history.steps[-steps:]
    calls = [step.get(f"{TOOL_PREFIX}{tool}: calls", 0.0) for step in newest]
    if len(newest) < steps or min(calls) <= 0:
        return []
    return [
        _divide(step.get(f"{TOOL_PREFIX}{tool}: timed_out"), count) for step, count in zip(newest, calls, strict=True)
    ]


def measure_no_updates(history: StepHistory, health: HealthConfig) -> str | None:
    steps = min(health.no_updates_steps, history.run_steps or health.no_updates_steps)
    if history.updates > 0 or history.num_steps < steps or not is_finite(history.steps[-1].get("updates", math.nan)):
        return None
    return f"no update has changed the weights in {history.num_steps} steps (limit {steps} steps)"


def measure_entropy(history: StepHistory, health: HealthConfig) -> str | None:
    values, limit = history.list_newest("entropy", health.window_steps), health.entropy_nats
    share = _find_unsolved_share(history, health)
    if not values or max(values) >= limit or share is None:
        return None
    return (
        f"the entropy of the last {health.window_steps} steps is {statistics.fmean(values):.2g} nats per token "
        f"(limit {limit:g}), and {share:.0%} of the trajectories are positives"
    )


def measure_gradient_norm(history: StepHistory, health: HealthConfig) -> str | None:
    newest = history.list_newest("grad_norm", 1)
    before, limit = history.list_values("grad_norm")[:-1], health.gradient_norm_factor
    if not newest or len(before) < MIN_STEPS_BEFORE_SPIKE:
        return None
    usual = statistics.median(before)
    if newest[0] <= limit * usual or usual == 0:
        return None
    return (
        f"the gradient norm is {newest[0]:.3g}, {newest[0] / usual:.0f} times the median {usual:.3g} of the {len(before)} "
        f"steps before (limit {limit:g} times)"
    )


def measure_clipping(history: StepHistory, health: HealthConfig) -> str | None:
    limit = health.clipping_share
    if (mean := _find_mean_above(history, "clip_fraction", limit, health)) is None:
        return None
    return f"the loss clips {mean:.0%} of the tokens of the last {health.window_steps} steps (limit {limit:.0%})"


def measure_mismatch(history: StepHistory, health: HealthConfig) -> str | None:
    newest = history.steps[-1] if history.steps else {}
    undefined = [name for name in ("mismatch_k3", "mismatch_above_1") if not is_finite(newest.get(name, 0.0))]
    if undefined:
        return f"{' and '.join(undefined)} of the last step is not a finite number"
    found: list[str] = []
    if (mean := _find_mean_above(history, "mismatch_k3", health.mismatch_k3_nats, health)) is not None:
        found.append(f"the KL divergence (k3) is {mean:.2g} nats per token (limit {health.mismatch_k3_nats:g})")
    if (mean := _find_mean_above(history, "mismatch_above_1", health.mismatch_token_share, health)) is not None:
        found.append(f"{mean:.1%} of the tokens differ by more than 1 nat (limit {health.mismatch_token_share:.1%})")
    where = f"between engine and learner, in the last {health.window_steps} steps, "
    return where + " and ".join(found) if found else None


def measure_confident_tokens(history: StepHistory, health: HealthConfig) -> str | None:
    """Measure the newest step only. Skip stale tokens: they differ because the policy has changed since."""
    newest, limit = history.list_newest("mismatch_confident", 1), health.confident_tokens_count
    if not newest or newest[0] <= limit or history.steps[-1].get("staleness_max", 0.0) > 0:
        return None
    return (
        f"{newest[0]:.0f} tokens of the last step have a probability of at least 50% in the engine, and a more than 2 nats "
        f"smaller one in the learner with the same weights (limit {limit:g})"
    )


def measure_weight_sync(history: StepHistory, health: HealthConfig) -> str | None:
    newest = history.steps[-1] if history.steps else {}
    unmoved, engines, since, moved, followed = (
        newest.get(f"probe_{name}", 0.0) for name in ("unmoved_engines", "engines", "since", "moved", "followed")
    )
    if unmoved > 0:
        return (
            f"{unmoved:.0f} of {engines:.0f} engines did not receive the published weights: since version {since:.0f} the "
            f"learner's log probabilities of fixed prompts moved by {moved:.2g} nats, and the engine's by {followed:.0%} of "
            f"that (limit {UNMOVED_BELOW:.0%})"
        )
    limit = max(health.weight_sync_nats, health.weight_sync_factor * newest.get("probe_mismatch", 0.0))
    if (mean := _find_mean_above(history, "probe_gap", limit, health)) is None:
        return None
    return (
        f"the log probabilities of fixed prompts differ by {mean:.2g} nats between an engine and the learner with the same "
        f"version of the weights, in the last {health.window_steps} steps (limit {limit:.2g}, by the mismatch of training "
        "tokens)"
    )


def measure_equal_groups(history: StepHistory, health: HealthConfig) -> str | None:
    limit, window = health.equal_groups_share, history.steps[-health.window_steps :]
    shares = [_divide(step.get("groups_rejected"), step.get("groups")) for step in window]
    share = _find_unsolved_share(history, health)
    if len(shares) < health.window_steps or min(shares) <= limit or share is None:
        return None
    return (
        f"{statistics.fmean(shares):.0%} of the groups of the last {health.window_steps} steps have equal rewards "
        f"(limit {limit:.0%}), and {share:.0%} of the trajectories are positives"
    )


def measure_skipped_updates(history: StepHistory, health: HealthConfig) -> str | None:
    newest, window = history.steps[-1] if history.steps else {}, health.window_steps
    undefined = [name for name in ("loss", "grad_norm", "entropy") if not is_finite(newest.get(name, 0.0))]
    skipped, updates = (history.sum_newest(name, window) for name in ("updates_skipped", "updates"))
    limit = health.skipped_updates_share
    is_over = updates > 0 and skipped / updates > limit
    if not is_over and not undefined:
        return None
    also = f"; {', '.join(undefined)} of the last step: not a finite number" if undefined else ""
    return (
        f"{skipped:.0f} of the {updates:.0f} updates of the last {window} steps are skipped (limit {limit:.0%}){also}"
    )


def measure_reward_drop(history: StepHistory, health: HealthConfig) -> str | None:
    mean = history.compute_mean("reward", health.window_steps)
    first, best = history.first_reward, history.best_reward
    if mean is None or first is None or best is None:
        return None
    start = history.find_reference_reward()
    is_start = start is not None and start > best
    best = start if start is not None and is_start else best
    limit = health.reward_drop_share * max(abs(best), best - first)
    if best - mean <= max(limit, REWARD_NOISE_FACTOR * history.compute_noise("reward")):
        return None
    reference = f"that before the first update was {best:.3g}" if is_start else f"the best one was {best:.3g}"
    return f"the mean reward of the last {health.window_steps} steps is {mean:.3g}, and {reference} (limit {limit:.3g} less)"


def measure_evaluation_drop(history: StepHistory, health: HealthConfig) -> str | None:
    if history.first_reward is None:
        return None
    noise, window = history.compute_noise("reward"), health.window_steps
    found = [
        drop
        for name, points in history.evaluations.items()
        if (drop := find_drop(name, points, history.first_reward, noise, window)) is not None
    ]
    worst = max(found, key=lambda drop: drop.errors, default=None)
    if worst is None or worst.errors <= health.evaluation_drop_errors:
        return None
    return (
        f"the accuracy of the {worst.name} evaluation fell from {worst.before.accuracy:.1%} (version {worst.before.version}) "
        f"to {worst.newest.accuracy:.1%} (version {worst.newest.version}), {worst.errors:.1f} standard errors (limit "
        f"{health.evaluation_drop_errors:g}), while the training reward rose from {worst.reward:.3g} to "
        f"{worst.newest.reward:.3g}"
    )


def measure_recomputation(history: StepHistory, health: HealthConfig) -> str | None:
    limit = health.recomputation_share
    if (mean := _find_mean_above(history, "recomputed_share", limit, health)) is None:
        return None
    return (
        f"{mean:.0%} of the tokens that engines prefilled in the last {health.window_steps} steps were in the cache "
        f"before (limit {limit:.0%})"
    )


def measure_masked_trajectories(history: StepHistory, health: HealthConfig) -> str | None:
    limit, window = health.masked_trajectories_share, history.steps[-health.window_steps :]
    shares = [_compute_masked_share(step) for step in window]
    if len(shares) < health.window_steps or min(shares) <= limit:
        return _measure_masked_run(history, health)
    causes: dict[str, float] = {}
    for step in window:
        for name in filter(lambda name: name.startswith(FAILURE_PREFIX), step):
            causes[name] = sum_finite([causes.get(name, 0.0), step[name]])
    most = max(causes, key=lambda name: causes[name], default="")
    part = f", most of them by {most.removeprefix(FAILURE_PREFIX)}" if most else ""
    return (
        f"{statistics.fmean(shares):.0%} of the trajectories of the last {len(window)} steps are lost to infrastructure "
        f"and masked{part} (limit {limit:.0%})"
    )


def _measure_masked_run(history: StepHistory, health: HealthConfig) -> str | None:
    """Measure the whole run: failures that depend on the row occur in some steps only."""
    total, limit = history.failed + history.trajectories, health.masked_run_share
    share = _divide(history.failed, total)
    if history.num_steps < health.window_steps or share <= limit:
        return None
    most = max(history.failures, key=lambda part: history.failures[part], default="")
    part = f", most of them by {most}" if most else ""
    return f"{history.failed:.0f} of the {total:.0f} trajectories of the run are masked{part} ({share:.0%}, limit {limit:.0%})"


def _compute_masked_share(step: Mapping[str, float]) -> float:
    failed, finished = step.get("trajectories_failed", 0.0), step.get("trajectories", 0.0)
    return _divide(failed, failed + finished)


def _divide(part: float | None, whole: float | None) -> float:
    """Return the quotient, or 0 if a value is missing or not finite, or if the whole is 0."""
    if part is None or not whole or not is_finite(part) or not is_finite(whole):
        return 0.0
    return part / whole


HEALTH_CHECKS: Mapping[str, HealthCheck] = {
    "length_limit": HealthCheck(
        measure_length_limit,
        "answers grow during training, or the model repeats itself until the limit",
        "raise dialogue.response_tokens, or make long answers cost reward (reward.functions)",
    ),
    "tool_errors": HealthCheck(
        measure_tool_errors,
        "the reward does not depend on failed calls, so that answers with repaired calls are reinforced",
        "set roc.enabled = true, or lower learner.optimizer.lr",
    ),
    "tool_timeouts": HealthCheck(
        measure_tool_timeouts,
        "the tool waits for a service that does not answer, or its limit is shorter than its work",
        "repair the tool, or raise sandbox.time_limit_s (Python tools) or call_limit_s of the task",
    ),
    "entropy": HealthCheck(
        measure_entropy,
        "too many or too large updates on few answers; the groups then contain equal answers",
        "lower learner.optimizer.lr or learner.minibatches, or raise learner.loss.clip_high or sampling.temperature",
    ),
    "gradient_norm": HealthCheck(
        measure_gradient_norm,
        "few rows in the batch, tokens with an extreme probability ratio, or a learning rate near divergence",
        "lower learner.optimizer.lr or learner.optimizer.max_grad_norm, or raise rl.prompts",
    ),
    "clipping": HealthCheck(
        measure_clipping,
        "the policy moves far within one step: too many or too large updates, or stale tokens",
        "lower learner.optimizer.lr, learner.minibatches or rl.max_staleness",
    ),
    "mismatch": HealthCheck(
        measure_mismatch,
        "engine and learner compute in different precision or with different weights",
        'set engine.dtype = "float32", or lower rl.max_staleness; check the engine\'s weights transfer (sglang.weights)',
    ),
    "confident_tokens": HealthCheck(
        measure_confident_tokens,
        "the engine has other weights than the learner, or one of them computes some tokens wrongly",
        'check the engine\'s weights transfer (sglang.weights), or set engine.dtype = "float32"',
    ),
    "weight_sync": HealthCheck(
        measure_weight_sync,
        "the published weights, or adapters, do not reach the engine, or it generates without them",
        "restart the engine, and check sglang.weights and learner.lora.publish",
    ),
    "equal_groups": HealthCheck(
        measure_equal_groups,
        "the questions are too hard, or a mixture of solved and unsolvable ones, or the reward is constant",
        "choose other questions (data.train), check reward.functions, or raise rl.rollouts or rl.max_refill_groups",
    ),
    "skipped_updates": HealthCheck(
        measure_skipped_updates,
        "overflow in the loss or in the weights: the learning rate is too high, or a loss of your own divides by 0",
        "lower learner.optimizer.lr, or check learner.loss.function; resume from a checkpoint from before",
    ),
    "no_updates": HealthCheck(
        measure_no_updates,
        "all groups have equal rewards or lose their trajectories, so that no group has a gradient",
        "choose other questions (data.train), check reward.functions, or raise rl.rollouts",
    ),
    "reward_drop": HealthCheck(
        measure_reward_drop,
        "the policy has diverged after a large update, or the grader or a tool has failed",
        "lower learner.optimizer.lr or learner.minibatches; check sandbox.backend and reward.functions",
    ),
    "evaluation_drop": HealthCheck(
        measure_evaluation_drop,
        "the policy exploits the training reward, or has memorized the training questions",
        "check reward.functions (`asterism task check --attack`), use more questions (data.train), or lower rl.steps",
    ),
    "recomputation": HealthCheck(
        measure_recomputation,
        "more trajectories are in flight than the KV cache holds, so that their caches are evicted during tool calls",
        'raise engine.kv_tokens or engine.num_engines, or set arbiter.policy = "kv_lookahead"',
    ),
    "masked_trajectories": HealthCheck(
        measure_masked_trajectories,
        "executors, tools or engines fail: no memory, a limit that is too low, or a service that does not answer",
        "see `failed: PART` in metrics.jsonl; raise sandbox.executors or sandbox.memory_mib",
    ),
}
