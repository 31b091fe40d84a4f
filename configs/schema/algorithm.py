"""The tables of the training algorithm: sampling, cold start, groups, RoC, learner, evaluations."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from asterism.configs.choices.optimizer_kinds import OPTIMIZER_KINDS
from asterism.configs.schema.health import Share
from asterism.configs.schema.schema_tree import (
    Count,
    FilePath,
    ImportPath,
    LearningRate,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    SignedFloat,
    TaskName,
    require,
    require_choice,
)
from asterism.configs.schema.success import parse_success


class Sampling(Section, frozen=True):
    """The parameters with which an engine samples tokens: the table [sampling], and a field of messages and requests.

    A further parameter is a field here and a filter in engine/inference/sampling.py. Servers receive the field's name;
    engine/sglang/http_api.py and engine/openai/completions_api.py translate values that servers write differently.
    """

    temperature: NonNegativeFloat = 1.0  # sampling temperature; 0: the most likely token
    top_p: PositiveShare = 1.0  # sample from the smallest set of tokens with this probability; must be 1 for training
    top_k: Count = 0  # sample from this many tokens; 0: all tokens; must be 0 for training

    @property
    def truncations(self) -> dict[str, float]:
        """The parameters that exclude tokens, by key: without the temperature, and without default values."""
        values, default = asdict(self), asdict(Sampling(temperature=self.temperature))
        return {key: value for key, value in values.items() if value != default[key]}

    def require_full_distribution(self) -> None:
        """Raise ValueError for sampling from another distribution than the policy's."""
        key = next(iter(self.truncations), "")
        require(
            not key,
            f"sampling.{key} must keep its default for training: the learner computes log probabilities under the full "
            f"distribution, so truncated sampling would train on another one; set evaluation.sampling.{key} instead",
        )

    def check(self) -> None:
        """Raise ValueError, with the field's name, for a value outside its bounds."""
        msgspec.convert(msgspec.to_builtins(self), Sampling)


GREEDY = Sampling(temperature=0.0)


class SftFileConfig(Section, frozen=True, kw_only=True):
    """A file of a mixture of dialogues."""

    name: TaskName  # name of the file in messages and metrics
    data: FilePath  # file of dialogues, as in sft.data
    weight: PositiveFloat = 1.0  # share of the drawn dialogues, relative to other files
    # System text and tools of a dialogue. row: the row's own, if it has any; run: the run's (docs/data.md).
    prompt: Literal["row", "run"] = "row"
    tool_names: dict[str, str] = {}  # noqa: RUF012  # the run's tool for each function that a row without tools calls
    calls: Literal["json", "python"] = "json"  # python: also read messages `[name(argument=value), ...]` as calls
    # Read rows of `instruction` and a Python `response` as dialogues that end with a call of this tool. Empty: off.
    program_tool: Literal["", "jupyter_code"] = ""
    where: dict[str, str] = {}  # noqa: RUF012  # column and text of the rows to use; other rows are left out


class SftConfig(Section, frozen=True):
    """The cold start, which teaches only tool format and answer format; `steps` or `epochs` enables it."""

    data: FilePath = "$RUN/data/sft.jsonl"  # dialogues: docs/data.md
    mixture: tuple[SftFileConfig, ...] = ()  # several files instead of `data`
    max_bad_rows: Count = 100  # limit of unusable rows per file, which are skipped; more rows end the run
    max_tokens: Count = 0  # limit of a dialogue's tokens; 0: no limit
    too_long: Literal["drop", "truncate"] = "drop"  # drop or truncate dialogues over max_tokens
    steps: Count = 0  # optimizer updates
    epochs: NonNegativeFloat = 0.0  # instead of `steps`: draw as many dialogues as all files have, times this number
    batch_size: PositiveInt = 64  # dialogues per update
    tokens_per_step: Count = 0  # limit of tokens per update, instead of `batch_size`; 0: use `batch_size`
    validation: FilePath = ""  # dialogues for a validation loss, as in `data`; empty: none
    validation_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # share of each file for a validation loss
    validation_every: PositiveInt = 100  # steps between validations; also after the last step
    optimizer: str = "adamw"  # adamw, or muon: Muon for the layers' matrices, AdamW for the rest
    lr: LearningRate = 1e-5  # learning rate of AdamW
    muon_lr: LearningRate = 1e-3  # learning rate of Muon
    warmup_steps: Count = 10  # optimizer updates during which the learning rate rises linearly
    weight_decay: NonNegativeFloat = 0.0  # weight decay of AdamW and Muon

    def __post_init__(self) -> None:
        require_choice("optimizer", self.optimizer, OPTIMIZER_KINDS)
        names = [each.name for each in self.mixture]
        repeated = next((name for name in names if names.count(name) > 1), "")
        require(not repeated, f'mixture: the name "{repeated}" is used twice')
        require(self.steps == 0 or self.epochs == 0, "set either steps or epochs; the other one must be 0")
        require(
            not (self.validation and self.validation_share),
            "set either validation or validation_share",
        )

    @property
    def is_enabled(self) -> bool:
        """True if the run has a cold start."""
        return self.steps > 0 or self.epochs > 0

    @property
    def files(self) -> dict[str, SftFileConfig]:
        """The files of dialogues by configuration key."""
        if not self.mixture:
            return {"sft.data": SftFileConfig(name="data", data=self.data)}
        return {f"sft.mixture.{each.name}.data": each for each in self.mixture}

    @property
    def file_names(self) -> tuple[str, ...]:
        """The names of several files, which have losses of their own."""
        return tuple(each.name for each in self.mixture) if len(self.mixture) > 1 else ()

    @property
    def validation_files(self) -> dict[str, SftFileConfig]:
        """The validation file by configuration key."""
        return {"sft.validation": SftFileConfig(name="validation", data=self.validation)} if self.validation else {}


class RlConfig(Section, frozen=True):
    steps: Count = 300  # training steps of the run
    prompts: PositiveInt = 512  # groups per training step
    rollouts: Annotated[int, Meta(ge=2, le=65_536)] = 32  # trajectories per group (2G); at least 4 with roc.enabled
    first_problem: Count = 0  # position in the sequence of problems at which the run begins
    max_refill_groups: Count = 0  # limit, per step, of new groups that replace groups with equal rewards
    advantage_estimator: ImportPath = "grpo"  # "grpo", "dr_grpo", or a function by import path: docs/losses.md
    # How trajectories begin and advance: "independent", or a policy by import path (examples/rollout_policies.py).
    rollout_policy: ImportPath = "independent"
    group_filter: ImportPath = "unequal_rewards"  # groups to train on, or a function by import path: docs/losses.md
    # Number of tokens before dialogue.response_tokens over which the penalty grows linearly; 0: no penalty.
    overlong_buffer_tokens: Count = 0
    overlong_penalty: PositiveFloat = 1.0  # penalty at the length limit; needs overlong_buffer_tokens
    overlong: Literal["keep", "drop"] = "keep"  # training keeps or drops responses that the length limit ends
    repeated_ngram_tokens: Annotated[int, Meta(ge=0, le=1024)] = 0  # length of the n-grams to count; 0: no filter
    repeated_ngram_limit: PositiveInt = 20  # responses with more occurrences of an n-gram are not trained on
    max_staleness: Count = 0  # rollouts are at most so many versions ahead of the learner: docs/staleness.md
    stale_tokens: Literal["mask", "drop"] = "mask"  # training masks stale tokens, or drops their trajectories
    # Groups that a step starts, as a multiple of `prompts`; the step uses the first complete ones.
    group_oversampling: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    surplus_groups: Literal["carry", "abort"] = "abort"  # carry surplus groups over to the next step, or abort them

    def __post_init__(self) -> None:
        require(
            self.rollouts % 2 == 0,
            f"rollouts must be even, since Resample-on-Correct keeps half of them: {self.rollouts}",
        )
        require(
            self.surplus_groups == "abort" or self.max_staleness > 0,
            'surplus_groups = "carry" needs a max_staleness of at least 1, since with 0 all trajectories of a step have '
            'the same version; use "abort"',
        )

    @property
    def started_groups(self) -> int:
        """The number of groups that one step starts."""
        return math.ceil(round(self.prompts * self.group_oversampling, 6))  # 1.1 * 10 is a little more than 11

    @property
    def max_groups_in_flight(self) -> int:
        """The maximum number of unfinished groups, without groups that are being aborted."""
        spare = self.started_groups - self.prompts
        steps = self.max_staleness + 1
        return steps * self.prompts + (spare if self.surplus_groups == "carry" else steps * spare)


class EarlyStoppingConfig(Section, frozen=True):
    """Rules that end RL before rl.steps; one more step is trained after the step at which a rule holds."""

    window_steps: Count = 0  # steps of the window for means; 0: no early stopping
    min_steps: Count = 0  # steps before a rule can stop the run
    # Least increase of the mean reward from one window to the next; 0: no such rule.
    min_reward_gain: NonNegativeFloat = 0.0
    max_overlong_share: Share = 0.0  # limit of the share of responses that the length limit ends; 0: no such rule

    def __post_init__(self) -> None:
        has_rule = self.min_reward_gain > 0 or self.max_overlong_share > 0
        require(
            has_rule == (self.window_steps > 0),
            "window_steps needs min_reward_gain or max_overlong_share, and they need window_steps",
        )


class RocConfig(Section, frozen=True):
    """Resample-on-Correct. The defaults follow the report; presets/rstar2_release.toml follows the release."""

    enabled: bool = True  # resample groups; false: plain GRPO, which trains on the whole group
    keep: Count = 0  # trajectories per group to train on; 0: half of rl.rollouts
    penalty: Literal["report", "release"] = "report"  # formula for failed calls and format
    error_penalty: bool = True  # whether failed calls are penalized
    format_penalty: bool = True  # whether wrong answer tags are penalized
    # Draw of correct trajectories: weighted by penalty, or those with the lowest penalties.
    positives: Literal["weighted", "lowest"] = "weighted"
    negatives: Literal["uniform", "first"] = "uniform"  # draw of wrong trajectories
    # Trajectories with a larger reward are positives ("correct"), unless evaluation.success decides.
    positive_above: SignedFloat = 0.0
    # Least number of positives that a group keeps, if it has so many; above it, both classes keep their shares of the group.
    min_positives: Count = 1
    min_negatives: Count = 1  # least number of negatives that a group keeps, if it has so many
    # A weighted draw has the weights 1 / max(penalty, floor): docs/release.md has a table of the effect.
    floor: Annotated[float, Meta(gt=0, le=2)] = 0.1


class EvaluationSetConfig(Section, frozen=True, kw_only=True):
    """Questions of evaluations, with metrics of their own."""

    name: TaskName  # name of the set in metrics
    data: FilePath  # file of rows, as in data.test
    task: str = ""  # name of the questions' task; empty: the first task
    questions: Count = 0  # limit of questions; 0: evaluation.questions
    samples: PositiveInt = 1  # answers per question; each answer has its own seed
    every: Count = 0  # RL steps between evaluations of this set during training; 0: evaluation.every


class EvaluationConfig(Section, frozen=True):
    """Evaluations before the first RL step and after the last: a sampled and a greedy answer per question.
    docs/evaluation.md"""

    questions: Count = 512  # limit of questions of data.test, of each tasks[].test, and of each set; 0: no evaluation
    every: Count = 0  # RL steps between evaluations during training; 0: none
    # Limit of a response's generated and tool tokens in evaluations; 0: each task's dialogue.response_tokens.
    response_tokens: Count = 0
    during: Literal["sampled", "greedy"] = "sampled"  # kind of answers in evaluations during training
    keep_best: bool = True  # keep the checkpoint with the best reward in evaluations during training; needs `every`
    # Rule for a correct answer: a component ("correct") or a limit ("correct >= 1", "reward > 0.5");
    # empty: a reward above roc.positive_above (docs/rewards.md).
    success: str = ""
    sampling: Sampling | None = None  # applies to evaluations that are not greedy; absent keys are those of [sampling]
    sets: tuple[EvaluationSetConfig, ...] = ()  # sets of questions instead of data.test and tasks[].test
    only: bool = False  # evaluate model.checkpoint and do nothing else: `asterism eval` sets it

    def __post_init__(self) -> None:
        require(not any(self.intervals) or self.questions > 0, "every must be 0 without questions; set questions")
        if self.success:
            parse_success(self.success)
        names = [each.name for each in self.sets]
        repeated = next((name for name in names if names.count(name) > 1), "")
        require(not repeated, f'sets: the name "{repeated}" is used twice')

    @property
    def intervals(self) -> tuple[int, ...]:
        """RL steps between two evaluations during training, by set; without sets, one number for all. 0: none."""
        return tuple(each.every or self.every for each in self.sets) or (self.every,)

    @property
    def saves_evaluated_steps(self) -> bool:
        """True if the learner saves a checkpoint of each step in which the first set is evaluated."""
        return self.intervals[0] > 0 and self.keep_best

    def is_saved(self, step: int) -> bool:
        return self.saves_evaluated_steps and step % self.intervals[0] == 0
