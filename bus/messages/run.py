"""Start, progress and end of a run: messages between the launcher and all processes."""

from typing import Literal

import msgspec

from asterism.bus.messages.message import Message
from asterism.configs.schema.health import HealthConfig


class BufferCursor(msgspec.Struct, frozen=True, array_like=True):
    """The state of the group buffer between two steps."""

    position: int = 0  # position in the infinite sequence of problems
    next_group_id: int = 0
    next_trajectory_id: int = 0
    pending: tuple[int, ...] = ()  # positions of unfinished groups, which are restarted first


class StepOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Means over the finished trajectories of a step, before any selection."""

    step: int
    reward: float
    overlong_share: float  # share of the trajectories that the length limit ended


class RunStarted(Message, frozen=True):
    """process -> its own deciders, as the first event of each launch of a run: start after `step`.

    `cursor` is the buffer's state at the end of that step, from the event log.
    """

    step: int
    cursor: BufferCursor
    health: HealthConfig | None = None  # options of this launch, for the recorder; None: as in the run's configuration
    earlier_steps: tuple[StepOutcome, ...] = ()  # outcome of each step up to `step`; empty without [early_stopping]
    answered: tuple[int, ...] = ()  # seeds of the answers of earlier launches, with evaluation.only


class EarlyStopDecided(Message, frozen=True):
    """recipe -> launcher: a rule of [early_stopping] holds after `step`."""

    step: int
    last_step: int  # last step of the run
    cause: str


class RunFinished(Message, frozen=True):
    """recipe -> buffer -> launcher: all trajectories have ended."""

    steps: int


class RunFailed(Message, frozen=True):
    """buffer -> launcher: every trajectory of a step or of an evaluation failed.
    recorder -> launcher: a health check ends the run."""

    cause: str  # the first failure, or the check's message


class MetricsRecorded(Message, frozen=True):
    """recorder -> the head's metrics file: one line. learner -> recorder: a line about a step of the cold start."""

    kind: Literal["sft", "step", "evaluation", "lengths"]
    step: int
    label: str  # label of an evaluation; otherwise empty
    values: dict[str, float]


class HealthReported(Message, frozen=True):
    """recorder -> launcher, and the head's metrics file: a health check found a problem (docs/health.md)."""

    step: int
    check: str  # key of the check in [health]
    action: Literal["warn", "stop"]  # stop: RunFailed follows
    message: str  # text with the numbers, the usual cause and the keys to change
    checks: tuple[str, ...] = ()  # all checks that triggered in this step; empty: a log of an earlier Asterism


class FailureReported(Message, frozen=True):
    """buffer -> launcher: the first failed trajectory of its kind in this launch, only for the display and the log."""

    step: int  # step of training; 0: an evaluation
    trajectory_id: int
    problem: str  # see StartGroup
    cause: str  # see TrajectoryFailed


class Progress(Message, frozen=True):
    """any process -> launcher, only for the display: the progress of a stage."""

    stage: str
    step: int
    steps: int
    values: dict[str, float]


class CheckpointRequested(Message, frozen=True):
    """launcher -> learner, at an interrupt: save the step that was trained last, and train no further step."""


class CheckpointSaved(Message, frozen=True):
    """learner -> launcher, after CheckpointRequested: the checkpoint is saved."""

    step: int  # step of the checkpoint; -1: the learner has not started RL


class Shutdown(Message, frozen=True):
    """launcher -> every process: exit after all logs are written."""


RunMessage = (
    RunStarted
    | EarlyStopDecided
    | RunFinished
    | RunFailed
    | MetricsRecorded
    | HealthReported
    | FailureReported
    | Progress
    | CheckpointRequested
    | CheckpointSaved
    | Shutdown
)
