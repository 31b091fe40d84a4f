"""One trajectory: a frozen record of where it stands, and what it forbids there. policies.transitions moves it on.

leasing --LeaseGranted--> generating --TurnGenerated--> calling --CodeFinished (all)--> leasing ...
   ^                          |  |                                                         |
   +-- its lease ended, or ---+  +--> grading --AnswerGraded--> ended <--- length, turns, no answer
       the engine failed
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeRequested,
    LeaseDeferred,
    LeaseGranted,
    ProtocolError,
    StartGroup,
    TurnFailed,
    TurnGenerated,
)
from policies.dialogue import MalformedCall, ToolCall, ToolName
from policies.draws import SIBLING, mix
from policies.record import Record
from policies.tool_text import ResultFormat

Phase = Literal["leasing", "generating", "calling", "grading", "ended"]
Ending = Literal["answered", "no_answer", "length", "turns"]
TrajectoryEvent = LeaseGranted | LeaseDeferred | TurnGenerated | TurnFailed | CodeFinished | CallFailed | AnswerGraded

GRADING = -1  # a grading's number among the calls


class Rules(msgspec.Struct, frozen=True):
    """What is the same for all trajectories of a run."""

    tools: tuple[ToolName, ...]
    response_tokens: int
    max_turns: int
    max_calls_per_turn: int
    result_characters: int
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    result_format: ResultFormat = "default"
    arbiter: str = "head/arbiter"
    buffer: str = "head/buffer"
    launcher: str = "launcher"


class Waits(msgspec.Struct, frozen=True, array_like=True):
    """Seconds spent in each phase."""

    leasing: float = 0.0
    generating: float = 0.0
    calling: float = 0.0
    grading: float = 0.0


class Trajectory(msgspec.Struct, frozen=True, array_like=True):
    trajectory_id: int
    group: StartGroup
    record: Record
    phase: Phase = "leasing"
    since: float = 0.0  # when the phase began
    waits: Waits = Waits()
    engine: str = ""
    engine_life: int = 0
    lease: int = 0
    leased_tokens: int = 0
    executor: str = ""  # where it is placed; empty before its first call, and while there is no executor
    turn: int = 0
    turn_start: int = 0  # position of the present turn's first token
    requested: tuple[ToolCall | MalformedCall, ...] = ()  # the present turn's calls, in their order
    results: tuple[str | None, ...] = ()  # their texts, as they come
    calls: int = 0
    calls_failed: int = 0
    responses_with_error: int = 0
    answer: str = ""
    answer_opens: int = 0
    answer_closes: int = 0
    holds_lease: bool = True
    has_session: bool = False
    cells: tuple[CodeRequested, ...] = ()  # whose effects its notebook holds
    retries: int = 0
    retried_calls: tuple[int, ...] = ()
    aborted: str = ""  # why it is to end

    @property
    def seed(self) -> int:
        """Distinct for each sibling; the same in every run with the same seed."""
        return mix(self.group.seed, SIBLING, self.trajectory_id - self.group.first_trajectory_id) >> 1

    @property
    def open_calls(self) -> tuple[int, ...]:
        """Numbers of the calls that it waits for; GRADING for a grading."""
        if self.phase == "grading":
            return (GRADING,)
        if self.phase != "calling":
            return ()
        return tuple(self.calls + place for place, result in enumerate(self.results) if result is None)

    def code_request(self, number: int) -> CodeRequested:
        call = self.requested[number - self.calls]
        assert isinstance(call, ToolCall)  # malformed calls have their result from the start
        return CodeRequested(self.trajectory_id, number, call.tool, call.code, call.stdin)

    def submission(self) -> AnswerSubmitted:
        return AnswerSubmitted(self.trajectory_id, self.answer, self.group.ground_truth)

    def entering(self, phase: Phase, now: float) -> Trajectory:
        """Change the phase, and book the time of the one that ends."""
        waits = self.waits
        if self.phase != "ended":
            spent = getattr(waits, self.phase) + now - self.since
            waits = replace(waits, **{self.phase: spent})
        return replace(self, phase=phase, since=now, waits=waits, retries=0, retried_calls=())

    # ---------------------------------------------------------------- guards: all raise ProtocolError

    def expect(self, phase: Phase, event: TrajectoryEvent) -> None:
        if self.phase != phase:
            name = type(event).__name__
            raise ProtocolError(f"trajectory {self.trajectory_id} is {self.phase}: {name} has no place there")

    def expect_grant(self, event: LeaseGranted) -> None:
        self.expect("leasing", event)
        name = f"trajectory {self.trajectory_id}"
        if event.lease != self.lease + 1:
            raise ProtocolError(f"{name} waits for lease {self.lease + 1}, not {event.lease}")
        if event.tokens <= self.record.num_tokens:
            raise ProtocolError(f"{name} has {self.record.num_tokens} tokens, and may have {event.tokens}")

    def expect_turn(self, event: TurnGenerated | TurnFailed) -> None:
        self.expect("generating", event)
        if (event.turn, event.lease) != (self.turn, self.lease):
            raise ProtocolError(
                f"trajectory {self.trajectory_id} is in turn {self.turn} under lease {self.lease}, "
                f"not in turn {event.turn} under lease {event.lease}"
            )

    def expect_call(self, event: CodeFinished | CallFailed) -> None:
        self.expect("calling", event)
        if event.call not in self.open_calls:
            raise ProtocolError(f"trajectory {self.trajectory_id} does not wait for call {event.call}")
