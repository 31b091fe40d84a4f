"""Injects faults at an operation of a learner rank: at its start, the rank kills or stops itself or blocks its main thread.

A run imports the module because `learner.loss.function` names a function of it, which computes GRPO's loss.

The nth incarnation of the learner has the nth fault in the environment variable.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import msgspec

from asterism.bus.process.operations import OperationRecord
from asterism.policies.losses.grpo import compute_grpo_loss

__all__ = ["LOSS", "RankFault", "compute_grpo_loss", "make_environment"]
LOSS = f"{__name__}:compute_grpo_loss"
_VARIABLE = "ASTERISM_TEST_RANK_FAULTS"


class RankFault(msgspec.Struct, frozen=True):
    rank: int
    step: int
    operation: str  # "forward and backward", "publish", "barrier" or "save"
    signal: signal.Signals | None  # None: block the main thread

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the operation and of the operation around it, as the launcher reports them."""
        return (f"save of step {self.step}",) if self.operation == "save" else (f"step {self.step}", self.operation)

    def is_due(self, begun: str, running: Sequence[str]) -> bool:
        """Return whether `begun`, one of the running operations, is the operation of the fault."""
        return begun == self.operations[-1] and set(self.operations) <= set(running)


def make_environment(faults: Sequence[RankFault]) -> dict[str, str]:
    return {**os.environ, _VARIABLE: msgspec.json.encode(faults).decode()}


def _happen(fault: RankFault) -> None:
    if fault.signal is None:
        threading.Event().wait()
    else:
        os.kill(os.getpid(), fault.signal)


def _install(fault: RankFault) -> None:
    run = OperationRecord.run

    @contextmanager
    def run_with_fault(record: OperationRecord, name: str, *, is_limited: bool = True) -> Generator[None]:
        with run(record, name, is_limited=is_limited):
            running = [each.name for each in record.running]
            if fault.is_due(name, running):
                _happen(fault)
            yield

    OperationRecord.run = run_with_fault


if "RANK" in os.environ and _VARIABLE in os.environ:
    _faults = msgspec.json.decode(os.environ[_VARIABLE], type=list[RankFault])
    _incarnation = int(sys.argv[sys.argv.index("--incarnation") + 1])
    if _incarnation <= len(_faults) and _faults[_incarnation - 1].rank == int(os.environ["RANK"]):
        _install(_faults[_incarnation - 1])
