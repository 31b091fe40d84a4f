"""A notebook's processes, as they see themselves: who runs its cells, and who keeps the state before a cell.

    base          the first one, process 1 of its pid namespace, and parent of the others. It runs no code of the model's:
                  it is the state of no cells. It buries what ends, and when the worker does, it calls the checkpoint.
    worker        reads the calls and runs the cells, the same process as long as none of them dies.
    checkpoint    a copy of the worker from before a cell, which waits. When the worker dies, it says how, and is the
                  worker from then on: exactly the state before. It is ended when it is of no more use.

A worker makes a checkpoint before a cell, unless the cell is plain (`plain_cells`) and so have been all since the last
checkpoint, few and fast: these the executor runs again when one of them dies. The answer says how many cells the state
holds then. An idle session is the base and a worker, and a checkpoint if its last cells were plain.

A copy has one thread, no timers of `signal.setitimer`, and no children. Where the worker has some, it makes none: if the
cell dies, the session goes back to an earlier checkpoint or to the base, and the executor runs the cells since again.
A session that went back has another process id and has lost its locks of `fcntl.lockf`. Files, and how far an open file
has been read or written, are shared and not taken back. What the code has given to `os.register_at_fork` runs at each copy.

Code of the model's can harm all this as far as its own session goes: end the checkpoint, close the socket, write into the
memory that says who is the worker. It loses its session's state by that, and the fork server ends what does not answer.
"""

import mmap
import os
import signal
import struct
import sys
import time
from types import ModuleType
from typing import NamedTuple, NoReturn

from sandbox.inside import kernel, plain_cells, program
from sandbox.inside.call_start import begin
from sandbox.inside.calls import Call, read_call, say_answer, say_started
from sandbox.inside.settings import Settings

SPARE_PROCESSES = 2  # base and checkpoint, beside what the code may start
_PLAIN_CELLS, _PLAIN_S = 256, 0.01  # behind a checkpoint; what it costs to run them again
_SIGNALS = frozenset(map(int, signal.valid_signals()))
# Not the public one, which takes longer to name the signals that it returns than to do its work.
_set_signals = sys.modules["_signal"].pthread_sigmask
_PENDING = 1024  # signals that are thrown away at most
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_TURN = struct.Struct("<QQQq")


class _Turn(NamedTuple):
    """Whose turn it is: memory that all of a session's processes share."""

    worker: int  # process id
    checkpoint: int  # who is to be the next one; 0: the base
    nonce: int  # of the cell that runs; 0: none
    exit_code: int  # of the worker before


class SessionProcess:
    """The part that this very process has in its session. A fork makes two of it."""

    def __init__(self, settings: Settings, own_namespaces: bool, main: ModuleType) -> None:
        self._settings = settings
        self._own_namespaces = own_namespaces
        self._main = main
        self._shared = mmap.mmap(-1, _TURN.size)
        self._pid = os.getpid()
        self._cells = 0  # that the state of this process holds
        self._checkpoint = 0  # its process id; 0: the base
        self._checkpoint_at = 0.0
        self._said = (0, 0)  # worker and checkpoint, as the fork server knows them
        self._repeatable = True  # the checkpoint's state and `_behind` plain cells give this one
        self._behind = 0
        self._behind_s = 0.0

    # ------------------------------------------------------------ base

    def serve(self, call: Call) -> NoReturn:
        """From the first cell on, until the fork server lets go of the session."""
        mask = _set_signals(signal.SIG_BLOCK, _SIGNALS)
        if not self._own_namespaces:
            kernel.adopt_orphans()
        while True:
            if call.cells:
                say_answer(["lost"], call.nonce, 0)
            elif self._fork_worker(call.nonce):
                _set_signals(signal.SIG_SETMASK, mask)
                self._work(call)
            call = read_call()

    def _fork_worker(self, nonce: int) -> bool:
        """True in the worker. False in the base, when it is its turn again."""
        self._set_turn(0, 0, nonce)
        try:
            child = os.fork()
        except OSError:
            say_answer(["lost"], nonce, 0)
            return False
        if child == 0:
            self._be_worker()
            return True
        self._watch(child)
        self._bury_all()
        self._say_how_the_worker_died()
        return False

    def _watch(self, first: int) -> None:
        """Until there is neither a worker nor a checkpoint."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            turn = self._turn()
            if pid == turn.worker or (pid == first and not turn.worker):
                exit_code = os.waitstatus_to_exitcode(status)
                self._set_turn(turn.checkpoint, 0, turn.nonce, exit_code)
                if not _call(turn.checkpoint):
                    return

    def _bury_all(self) -> None:
        """What is left belongs to a state that is gone. Without a pid namespace the fork server ends it."""
        try:
            if self._own_namespaces:
                os.kill(-1, signal.SIGKILL)
            while os.waitpid(-1, 0 if self._own_namespaces else os.WNOHANG)[0]:
                pass
        except (ProcessLookupError, ChildProcessError):
            return

    # ------------------------------------------------------------ worker

    def _work(self, call: Call) -> NoReturn:
        while True:
            self._take(call)
            call = read_call()

    def _take(self, call: Call) -> None:
        if call.cells != self._cells:
            say_answer(["lost"], call.nonce, self._cells)
            return
        self._set_turn(self._pid, self._checkpoint, call.nonce)
        # The code of a longer cell is not compiled before there is a checkpoint: that can end the process, too.
        codes = program.compiled_cell(call.code) if len(call.code) <= plain_cells.CHARACTERS else None
        plain = codes is not None and plain_cells.is_plain(codes, self._main.__dict__)
        if not (self._is_checkpoint_fresh() or (plain and self._is_cheap())) and self._can_be_copied():
            if not self._make_checkpoint():
                return
            self._set_turn(self._pid, self._checkpoint, call.nonce)
        self._run(call, codes or call.code, plain)

    def _is_checkpoint_fresh(self) -> bool:
        return self._repeatable and not self._behind

    def _is_cheap(self) -> bool:
        return self._repeatable and self._behind < _PLAIN_CELLS and self._behind_s < _PLAIN_S

    def _run(self, call: Call, code: str | program.CompiledCell, plain: bool) -> None:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        if not plain:  # which neither draws at random nor reads
            begin(call, self._settings)
        if not plain or self._said != (self._pid, self._checkpoint):
            say_started(self._pid, self._checkpoint, self._checkpoint_at)
            self._said = self._pid, self._checkpoint
        began_at = time.monotonic()
        outcome = program.run_cell(code, self._main)
        if os.getpid() != self._pid:
            program.end_of_a_fork(outcome)
        if outcome[0] == "exit":
            program.end_process(int(outcome[1]))  # which the checkpoint tells
        program.flush()
        self._cells += 1
        self._set_turn(self._pid, self._checkpoint, call.nonce)  # first, because the code may have made it impossible
        say_answer(outcome, call.nonce, self._cells)
        self._set_turn(self._pid, self._checkpoint, 0)
        if plain and self._repeatable and outcome[0] != "memory":
            self._behind += 1
            self._behind_s += time.monotonic() - began_at
            return
        self._repeatable = False
        if self._checkpoint and self._can_be_copied():  # before the next cell, too
            self._end_checkpoint()

    # ------------------------------------------------------------ checkpoints

    def _can_be_copied(self) -> bool:
        if not kernel.is_single_threaded() or any(any(signal.getitimer(timer)) for timer in _TIMERS):
            return False
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def _make_checkpoint(self) -> bool:
        """True in the worker, also if the kernel refuses. False in the checkpoint, when it is its turn."""
        self._end_checkpoint()
        now = time.monotonic()
        mask = _set_signals(signal.SIG_BLOCK, _SIGNALS)
        try:
            child = kernel.fork_sibling()
        except OSError:
            child = -1
        if child:
            _set_signals(signal.SIG_SETMASK, mask)
        if child > 0:
            if self._own_namespaces:  # where its base cannot end without it; it has hardly touched its memory yet
                os.kill(child, signal.SIGSTOP)
            self._checkpoint, self._checkpoint_at = child, now
            self._repeatable, self._behind, self._behind_s = True, 0, 0.0
        if child:
            return True
        self._be_worker()
        while self._turn().worker != self._pid:
            signal.sigwait(_SIGNALS)
        self._say_how_the_worker_died()
        _throw_away_signals()
        _set_signals(signal.SIG_SETMASK, mask)
        return False

    def _end_checkpoint(self) -> None:
        checkpoint, self._checkpoint, self._checkpoint_at = self._checkpoint, 0, 0.0
        self._repeatable = False
        if checkpoint:
            try:
                os.kill(checkpoint, signal.SIGKILL)
            except OSError:  # the code has done so already
                return

    def _be_worker(self) -> None:
        self._pid = os.getpid()
        os.setpgid(0, 0)  # a signal to the process group of one is none to the other
        if not self._own_namespaces:
            kernel.die_with_parent(signal.SIGKILL)

    def _say_how_the_worker_died(self) -> None:
        turn = self._turn()
        self._set_turn(self._pid, 0, 0)
        if turn.nonce:  # else it died between two cells; the next call shows it by the number of cells that it expects
            say_answer(["died", str(turn.exit_code)], turn.nonce, self._cells)

    def _turn(self) -> _Turn:
        return _Turn(*_TURN.unpack(self._shared))

    def _set_turn(self, worker: int, checkpoint: int, nonce: int, exit_code: int = 0) -> None:
        self._shared[:] = _TURN.pack(worker, checkpoint, nonce, exit_code)


def _call(checkpoint: int) -> bool:
    """It is the checkpoint's turn. False if there is none."""
    try:
        if not checkpoint or os.waitid(os.P_PID, checkpoint, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        os.kill(checkpoint, signal.SIGCONT)
    except (ChildProcessError, ProcessLookupError):
        return False
    return True


def _throw_away_signals() -> None:
    for _ in range(_PENDING):
        if signal.sigtimedwait(_SIGNALS, 0) is None:
            return
