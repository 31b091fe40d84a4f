"""The state of one trajectory, and the guards of its phases. asterism.policies.rollout.transitions contains the
transitions.

A trajectory with an environment starts in calling, until its first observation.

leasing --LeaseGranted--> generating --TurnGenerated--> calling --CodeFinished (all)--> leasing ...
   ^                          |  |                                                         |
   +-- lease used up, or -----+  +--> grading --AnswerGraded--> ended <--- length, turns, no answer
       engine failure
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from asterism.bus.addresses import ARBITER, BUFFER, LAUNCHER
from asterism.bus.messages import (
    OPENING_CALL,
    AnswerGraded,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeRequested,
    Ending,
    EnvironmentCalled,
    EnvironmentHistory,
    EnvironmentReturned,
    LeaseDeferred,
    LeaseGranted,
    ProtocolError,
    RewardInput,
    StartGroup,
    TokenRecord,
    ToolCount,
    TurnFailed,
    TurnGenerated,
)
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.policies.dialogue.dialogue_renderer import DialogueRenderer
from asterism.policies.dialogue.parse_turn import MalformedCall, ToolCall
from asterism.policies.dialogue.tool_results import ResultFormat
from asterism.policies.seeded_random import SIBLING, mix
from asterism.policies.tools.python_tools import PYTHON_TOOLS, build_program
from asterism.policies.tools.task_description import TaskKind

Phase = Literal["leasing", "generating", "calling", "grading", "ended"]
PHASES: tuple[Phase, ...] = ("leasing", "generating", "calling", "grading")  # phases of a live trajectory
CallAnswer = CodeFinished | EnvironmentReturned | CallFailed | AnswerGraded
TrajectoryEvent = LeaseGranted | LeaseDeferred | TurnGenerated | TurnFailed | CallAnswer

GRADING_CALL = -1  # the call number of a grading
STEP = "step"  # the method of a dialogue task that answers a turn


class Rules(msgspec.Struct, frozen=True):
    """The settings of all trajectories of a task."""

    renderer: DialogueRenderer
    response_tokens: int
    max_turns: int
    max_calls_per_turn: int
    result_characters: int
    stop_token_ids: tuple[int, ...]
    result_format: ResultFormat = "default"
    kind: TaskKind = "tools"
    prompt_tokens: int = 1 << 30  # limit of the prompt with the first observation
    surplus_calls: str = "error"  # see DialogueConfig
    graded_text: str = "last_turn"  # see DialogueConfig
    counts_release_marks: bool = False  # for roc.penalty = "release"
    evaluated_response_tokens: int = 0  # `response_tokens` of evaluations; 0: `response_tokens`
    arbiter: str = ARBITER
    buffer: str = BUFFER
    launcher: str = LAUNCHER

    @property
    def dialogue(self) -> DialogueFormat:
        return self.renderer.dialogue

    @property
    def of_evaluations(self) -> Rules:
        return replace(self, response_tokens=self.evaluated_response_tokens or self.response_tokens)


class PhaseTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds spent in each phase."""

    leasing: float = 0.0
    generating: float = 0.0
    calling: float = 0.0
    grading: float = 0.0


class Trajectory(msgspec.Struct, frozen=True, array_like=True):
    trajectory_id: int
    group: StartGroup
    record: TokenRecord
    phase: Phase = "leasing"
    since: float = 0.0  # start time of the phase
    waits: PhaseTimes = PhaseTimes()
    engine: str = ""
    engine_incarnation: int = 0
    migrations: int = 0  # migrations to another engine, between or within turns
    lease: int = 0
    leased_tokens: int = 0
    executor: str = ""  # address; empty before the first call, and while no executor is assigned
    turn: int = 0
    turn_start: int = 0  # position of the current turn's first token
    requested: tuple[ToolCall | MalformedCall, ...] = ()  # calls of the current turn
    results: tuple[str | None, ...] = ()  # result texts of `requested`; None for an open call
    calls: int = 0
    calls_failed: int = 0
    responses_with_error: int = 0
    answer: str = ""
    ending: Ending = "answered"  # valid in grading
    answer_opens: int = 0
    answer_closes: int = 0
    holds_lease: bool = True
    has_session: bool = False
    cells: tuple[CodeRequested, ...] = ()  # notebook cells that changed the notebook's state
    retries: int = 0
    retried_calls: tuple[int, ...] = ()
    aborted: str = ""  # cause of the abort
    environment: EnvironmentHistory = EnvironmentHistory()  # calls to the environment or dialogue
    is_done: bool = False  # whether a call has ended the trajectory
    answer_spans: int = 0  # answer blocks that are complete within a turn
    tools: dict[str, ToolCount] = {}  # answered calls by tool name

    @property
    def seed(self) -> int:
        """The sampling seed: different for each sibling, and equal in every run with the same seed."""
        return mix(self.group.seed, SIBLING, self.trajectory_id - self.group.first_trajectory_id) >> 1

    @property
    def open_calls(self) -> tuple[int, ...]:
        """The numbers of the open calls, or GRADING_CALL for a grading."""
        if self.phase == "grading":
            return (GRADING_CALL,)
        if self.phase != "calling":
            return ()
        if self.is_opening:
            return (OPENING_CALL,)
        return tuple(self.calls + place for place, result in enumerate(self.results) if result is None)

    @property
    def is_opening(self) -> bool:
        """True if the trajectory waits for the first observation."""
        return self.phase == "calling" and not self.requested

    def build_call_request(self, number: int) -> CodeRequested | EnvironmentCalled:
        if number == OPENING_CALL:
            return EnvironmentCalled(self.trajectory_id, number, self.group.task, "", self.group.row)
        call = self.requested[number - self.calls]
        assert isinstance(call, ToolCall)  # malformed calls are never open
        if call.tool in PYTHON_TOOLS:
            program = build_program(call.tool, call.arguments)
            return CodeRequested(self.trajectory_id, number, call.tool, program.code, program.stdin)
        arguments = msgspec.json.encode(call.arguments)
        return EnvironmentCalled(self.trajectory_id, number, self.group.task, call.tool, arguments)

    def build_submission(self) -> AnswerSubmitted:
        """Build the answer to grade, with the tokens if the run has reward functions."""
        record, row = self.record, self.group.row
        tokens = (
            RewardInput(self.ending, row, record.prompt_tokens, record.token_ids, record.loss_mask) if row else None
        )
        truth, task, sums = self.group.ground_truth, self.group.task, self.environment
        return AnswerSubmitted(self.trajectory_id, self.answer, truth, tokens, task, sums.rewards, sums.metrics)

    def enter_phase(self, phase: Phase, now: float) -> Trajectory:
        """Change the phase, and add the elapsed time to the previous phase."""
        waits = self.waits
        if self.phase != "ended":
            spent = getattr(waits, self.phase) + now - self.since
            waits = replace(waits, **{self.phase: spent})
        return replace(self, phase=phase, since=now, waits=waits, retries=0, retried_calls=())

    # ---------------------------------------------------------------- guards, which raise ProtocolError

    def expect_phase(self, phase: Phase, event: TrajectoryEvent) -> None:
        if self.phase != phase:
            name = type(event).__name__
            raise ProtocolError(f"trajectory {self.trajectory_id} is {self.phase} and does not accept {name}")

    def expect_grant(self, event: LeaseGranted) -> None:
        self.expect_phase("leasing", event)
        name = f"trajectory {self.trajectory_id}"
        if event.lease != self.lease + 1:
            raise ProtocolError(f"{name} waits for lease {self.lease + 1}, not {event.lease}")
        if event.tokens <= self.record.num_tokens:
            raise ProtocolError(f"{name} has {self.record.num_tokens} tokens, but its lease only {event.tokens}")

    def expect_turn(self, event: TurnGenerated | TurnFailed) -> None:
        self.expect_phase("generating", event)
        if (event.turn, event.lease) != (self.turn, self.lease):
            raise ProtocolError(
                f"trajectory {self.trajectory_id} is in turn {self.turn} under lease {self.lease}, "
                f"not in turn {event.turn} under lease {event.lease}"
            )

    def expect_call(self, event: CodeFinished | EnvironmentReturned | CallFailed) -> None:
        self.expect_phase("calling", event)
        if event.call not in self.open_calls:
            raise ProtocolError(f"call {event.call} of trajectory {self.trajectory_id} is not open")
        runs_code = isinstance(self.build_call_request(event.call), CodeRequested)
        wrong = EnvironmentReturned if runs_code else CodeFinished
        if isinstance(event, wrong):
            name = type(event).__name__
            raise ProtocolError(f"call {event.call} of trajectory {self.trajectory_id} does not accept {name}")
