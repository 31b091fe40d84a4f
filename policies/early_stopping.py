"""Ends a run before `rl.steps` by two rules, so that the next stage begins ([[stages]]).

    reward plateau     the mean reward of the last `window_steps` steps exceeds the mean of as many earlier steps by
                       less than `min_reward_gain`
    length limit       the mean share of responses cut by the length limit is at least `max_overlong_share` in the
                       last `window_steps` steps

The last step of the run is then the first one that cannot have been requested yet, so that the learner saves it. Its
number depends only on the outcomes of steps: a resumed run ends at the same step.
"""

from collections.abc import Iterable
from statistics import fmean

import msgspec

from asterism.bus.messages import StepCollected, StepOutcome
from asterism.configs.schema.algorithm import EarlyStoppingConfig
from asterism.policies.task_counts import compute_mean_reward, divide


def describe_outcome(collected: StepCollected) -> StepOutcome:
    totals, overlong = collected.counts.totals, collected.counts.endings.get("length", 0)
    reward = compute_mean_reward(totals.reward, totals.trajectories) or 0.0
    return StepOutcome(collected.step, reward, (divide(overlong, totals.trajectories) or 0.0))


def compute_last_step(step: int, max_staleness: int) -> int:
    """Return the run's last step if a rule holds after `step`: earlier steps can already be requested."""
    return step + 1 + max_staleness


class EarlyStopping(msgspec.Struct):
    """State of the rules in one launch of a run."""

    outcomes: list[StepOutcome] = []  # outcomes of the steps of the last two windows
    last_step: int = 0  # last step of the run; 0: no rule holds yet

    def restore(
        self,
        earlier: Iterable[StepOutcome],
        resume_step: int,
        options: EarlyStoppingConfig,
        num_steps: int,
        max_staleness: int,
    ) -> None:
        """Restore the state after `resume_step`, as if this launch had collected the steps. `num_steps`: rl.steps."""
        for outcome in earlier:
            last_step = compute_last_step(outcome.step, max_staleness)
            if self.record(outcome, options) and last_step <= num_steps:
                self.last_step = max(last_step, resume_step)
                return

    def record(self, outcome: StepOutcome, options: EarlyStoppingConfig) -> str:
        """Record a step; describe the rule that holds after it, or return an empty text."""
        self.outcomes.append(outcome)
        del self.outcomes[: -2 * options.window_steps]
        if outcome.step < options.min_steps or len(self.outcomes) < options.window_steps:
            return ""
        earlier, last = self.outcomes[: -options.window_steps], self.outcomes[-options.window_steps :]
        overlong = fmean(each.overlong_share for each in last)
        if options.max_overlong_share and overlong >= options.max_overlong_share:
            return f"the length limit ends {overlong:.1%} of the responses (early_stopping.max_overlong_share)"
        if not options.min_reward_gain or len(earlier) < options.window_steps:
            return ""
        gain = fmean(each.reward for each in last) - fmean(each.reward for each in earlier)
        return (
            f"the reward changes by {gain:+.4f} (early_stopping.min_reward_gain)"
            if gain < options.min_reward_gain
            else ""
        )
