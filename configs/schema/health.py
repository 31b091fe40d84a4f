"""[health]: checks of the metrics at the end of each step (docs/health.md). A resumed run can change these keys."""

from typing import Annotated, Literal

from msgspec import Meta

from asterism.configs.schema.schema_tree import NonNegativeFloat, PositiveFloat, Section

Action = Literal["off", "warn", "stop"]
Share = Annotated[float, Meta(ge=0, le=1)]
MAX_WINDOW_STEPS = 20


class HealthConfig(Section, frozen=True):
    """The action of each check, and its limits. warn: report a message; stop: also end the run, with exit code 1."""

    # Steps in a row in which a condition must hold, and over which means are taken.
    window_steps: Annotated[int, Meta(ge=1, le=MAX_WINDOW_STEPS)] = 3
    # Share of positives above which equal rewards and a low entropy are normal, since the questions are solved.
    solved_share: Share = 0.9

    length_limit: Action = "warn"  # many trajectories reach the length limit
    length_limit_share: Share = 0.1  # limit of the share of trajectories; twice the share needs only window_steps
    length_limit_steps: Annotated[int, Meta(ge=1, le=MAX_WINDOW_STEPS)] = 10  # steps over which the mean is taken

    tool_errors: Action = "warn"  # failed calls in positives increase, or are many
    tool_errors_rise: Share = 0.15  # limit of the increase of the share of failed calls over its lowest mean

    tool_errors_share: Share = 0.3  # limit of the share of failed calls in positives during tool_errors_steps steps
    tool_errors_steps: Annotated[int, Meta(ge=1, le=MAX_WINDOW_STEPS)] = 15  # steps; a policy learns calls in fewer

    tool_timeouts: Action = "warn"  # the calls of a tool reach their time limit
    tool_timeouts_share: Share = 0.5  # limit of the share of timeouts among the calls of one tool

    entropy: Action = "warn"  # collapse: the policy samples almost always the same tokens
    entropy_nats: NonNegativeFloat = 0.02  # nats per token; lower values are a collapse

    gradient_norm: Action = "warn"  # the gradient norm has a spike
    gradient_norm_factor: PositiveFloat = 20.0  # limit, as a multiple of the median of earlier steps

    clipping: Action = "warn"  # the loss clips many tokens
    clipping_share: Share = 0.3  # limit of the share of clipped tokens in the loss

    mismatch: Action = "warn"  # engine and learner compute different probabilities
    mismatch_k3_nats: NonNegativeFloat = 0.05  # limit of the mean KL divergence (k3) per token
    mismatch_token_share: Share = 0.02  # limit of the share of tokens with a difference of over 1 nat

    # Tokens with a probability of at least 50% in the engine and a much smaller one in the learner (docs/mismatch.md).
    confident_tokens: Action = "warn"
    confident_tokens_count: NonNegativeFloat = 0.0  # limit of such tokens per step

    # An engine does not compute with the weights that the learner published (docs/health.md).
    weight_sync: Action = "warn"
    weight_sync_factor: PositiveFloat = 4.0  # limit of the probe's gap relative to the mismatch of training tokens
    weight_sync_nats: NonNegativeFloat = 0.05  # smaller gaps do not count

    equal_groups: Action = "warn"  # most groups have equal rewards, and their questions are not solved
    equal_groups_share: Share = 0.8  # limit of the share of groups with equal rewards

    skipped_updates: Action = "warn"  # updates without a finite gradient
    skipped_updates_share: Share = 0.1  # limit of the share of skipped updates in the window

    no_updates: Action = "warn"  # no step has changed the weights
    no_updates_steps: Annotated[int, Meta(ge=1, le=MAX_WINDOW_STEPS)] = 3  # steps since the start, fewer in short runs

    reward_drop: Action = "warn"  # the reward falls below the run's best mean or its start
    reward_drop_share: Share = 0.2  # limit of the fall: share of the best value, or of the run's gain if larger

    evaluation_drop: Action = "warn"  # evaluations become worse while the training reward rises
    evaluation_drop_errors: PositiveFloat = 5.0  # limit in standard errors of the difference of two evaluations

    recomputation: Action = "warn"  # engines prefill tokens again after they evicted them
    recomputation_share: Share = 0.3  # limit of the share of recomputed tokens among prefilled tokens

    masked_trajectories: Action = "warn"  # trajectories are masked because of infrastructure failures
    masked_trajectories_share: Share = 0.1  # limit of the share of masked trajectories in the window
    masked_run_share: Share = 0.05  # limit of the share of masked trajectories in the whole run, with evaluations
