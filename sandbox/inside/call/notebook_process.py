"""A notebook's processes: one runs the cells, one holds the state before a cell for a rollback.

    base          the first process, process 1 of its pid namespace and parent of the others. It runs no
                  code of the model: it holds the state of zero cells. It reaps the others, and resumes
                  the checkpoint when the worker exits.
    worker        reads the calls and runs the cells; the same process until a cell kills it.
    checkpoint    a waiting fork of the worker from before a cell. When the worker exits, the checkpoint
                  reports the exit code and becomes the worker, with the state from before the cell. The
                  worker kills a checkpoint that is no longer needed.

A worker makes a checkpoint before a cell, unless this cell and all cells since the last checkpoint
are pure (`pure_cells`), few and fast: the executor replays such cells after a rollback. The answer
contains the number of cells in the resulting state. An idle notebook has the base, a worker, and, after
pure cells, a checkpoint.

A fork does not copy threads, timers of `signal.setitimer`, or children. A worker that has any of these
makes no checkpoint: if the cell kills it, the notebook rolls back to an earlier checkpoint or to the base,
and the executor replays the later cells. A cell also runs without a checkpoint if its state does not fit
into the memory limit twice. After a rollback, the worker has another pid and no `fcntl.lockf` locks. Files
and file offsets are shared and not rolled back. Hooks of `os.register_at_fork` run at each checkpoint.

The model's code can break this protocol in its own notebook: kill the checkpoint, close the
socket, or write to the shared memory that names the worker. The notebook then loses its state, and
the fork server kills processes that do not answer.
"""

import mmap
import os
import signal
import struct
import sys
import time
from types import ModuleType
from typing import NamedTuple, NoReturn

from asterism.sandbox.inside.call import pure_cells, run_code
from asterism.sandbox.inside.call.call_setup import set_up_call
from asterism.sandbox.inside.call.standard_streams import NotebookStreams
from asterism.sandbox.inside.isolation import syscalls
from asterism.sandbox.inside.wire.call_wire import (
    CELL_WITHOUT_CHECKPOINT,
    CallRequest,
    read_call,
    write_answer,
    write_started,
)
from asterism.sandbox.inside.wire.server_settings import ServerSettings

HARNESS_PROCESSES = 2  # base and checkpoint, in addition to the code's own limit
FORK_FAILED_EXIT_CODE = 71  # exit code of the base after a failed fork of the worker
_MAX_PURE_CELLS, _MAX_REPLAY_S = 256, 0.01  # limits of the cells since a checkpoint: number, run time
_SIGNALS = frozenset(map(int, signal.valid_signals()))
# The public wrapper spends most of its time on naming the signals in its result.
_set_signals = sys.modules["_signal"].pthread_sigmask
_MAX_PENDING_SIGNALS = 1024  # largest number of discarded signals
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SHARED_STATE = struct.Struct("<QQQq")
SHARED_STATE_BYTES = _SHARED_STATE.size


class _SharedState(NamedTuple):
    """The roles of a notebook's processes, in memory that they share."""

    worker: int  # pid of the worker
    checkpoint: int  # pid of the next worker; 0: the base forks it
    nonce: int  # nonce of the running cell; 0: none
    exit_code: int  # exit code of the previous worker


class NotebookProcess:
    """The state and role of this process. Each fork duplicates it."""

    def __init__(self, settings: ServerSettings, own_namespaces: bool, main: ModuleType, shared: mmap.mmap) -> None:
        self._settings = settings
        self._own_namespaces = own_namespaces
        self._main = main
        self._shared = shared
        self._streams, self._has_usable_streams = NotebookStreams(), True
        self._pid = os.getpid()
        self._num_cells = 0  # cells in the state of this process
        self._checkpoint = 0  # pid of the checkpoint; 0: the base
        self._checkpoint_at = 0.0
        self._reported = (0, 0)  # worker and checkpoint in the last report to the fork server
        self._is_replayable = True  # only pure cells ran since the checkpoint
        self._cells_since_checkpoint = 0
        self._replay_cost_s = 0.0

    # ------------------------------------------------------------ base

    def serve(self, call: CallRequest | None) -> NoReturn:
        """Run the notebook until the fork server closes the socket. `call` is the first cell, if it has arrived."""
        mask = _set_signals(signal.SIG_BLOCK, _SIGNALS)
        if not self._own_namespaces:
            syscalls.become_subreaper()
        while True:
            if call is not None and call.cells:
                write_answer(["lost"], call.nonce, 0)
            elif self._fork_worker(0 if call is None else call.nonce):
                _set_signals(signal.SIG_SETMASK, mask)
                self._run_calls(call or read_call())
            call = read_call()

    def _fork_worker(self, nonce: int) -> bool:
        """Fork a worker. Return True in the worker, False in the base after its worker and checkpoints have ended."""
        self._write_shared(0, 0, nonce)
        try:
            child = os.fork()
        except OSError:
            os._exit(FORK_FAILED_EXIT_CODE)
        if child == 0:
            self._become_worker()
            return True
        self._wait_for_processes(child)
        self._reap_all()
        self._report_worker_death()
        return False

    def _wait_for_processes(self, first: int) -> None:
        """Wait until there is neither a worker nor a checkpoint."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            shared = self._read_shared()
            if pid == shared.worker or (pid == first and not shared.worker):
                exit_code = os.waitstatus_to_exitcode(status)
                self._write_shared(shared.checkpoint, 0, shared.nonce, exit_code)
                if not _resume_checkpoint(shared.checkpoint):
                    return

    def _reap_all(self) -> None:
        """Kill and reap the processes of a lost state. Without a pid namespace, the fork server kills them."""
        try:
            if self._own_namespaces:
                os.kill(-1, signal.SIGKILL)
            while os.waitpid(-1, 0 if self._own_namespaces else os.WNOHANG)[0]:
                pass
        except (ProcessLookupError, ChildProcessError):
            return

    # ------------------------------------------------------------ worker

    def _run_calls(self, call: CallRequest) -> NoReturn:
        while True:
            self._handle_call(call)
            call = read_call()

    def _handle_call(self, call: CallRequest) -> None:
        if call.cells != self._num_cells:
            write_answer(["lost"], call.nonce, self._num_cells)
            return
        self._write_shared(self._pid, self._checkpoint, call.nonce)
        if not self._has_usable_streams:
            self._streams.restore()
        # A longer cell is compiled after the checkpoint: compiling can kill the process.
        codes = run_code.try_compile_cell(call.code) if len(call.code) <= pure_cells.MAX_CHARACTERS else None
        pure = codes is not None and pure_cells.is_pure(codes, self._main.__dict__)
        if call.kind == CELL_WITHOUT_CHECKPOINT:
            self._kill_checkpoint()
        elif self._needs_checkpoint(pure) and self._can_be_forked() and not self._make_checkpoint():
            return  # this process has resumed as the checkpoint, and reported the exit of the cell's worker
        self._write_shared(self._pid, self._checkpoint, call.nonce)
        self._run_cell(call, codes or call.code, pure)

    def _needs_checkpoint(self, pure: bool) -> bool:
        is_fresh = self._is_replayable and not self._cells_since_checkpoint
        return not is_fresh and not (pure and self._is_replay_cheap())

    def _is_replay_cheap(self) -> bool:
        return (
            self._is_replayable
            and self._cells_since_checkpoint < _MAX_PURE_CELLS
            and self._replay_cost_s < _MAX_REPLAY_S
        )

    def _run_cell(self, call: CallRequest, code: str | run_code.CompiledCell, pure: bool) -> None:
        if not pure:  # a pure cell uses no random numbers and no standard input
            set_up_call(call, self._settings)
        if not pure or self._reported != (self._pid, self._checkpoint):
            write_started(self._pid, self._checkpoint, self._checkpoint_at)
            self._reported = self._pid, self._checkpoint
        began_at = time.monotonic()
        outcome = run_code.run_cell(code, self._main)
        self._has_usable_streams = pure and outcome[0] == "ok"  # a pure cell cannot change the streams
        if os.getpid() != self._pid:
            run_code.exit_forked_child(outcome)
        if outcome[0] == "exit":
            run_code.exit_process(int(outcome[1]))  # the checkpoint reports the exit code
        run_code.flush_all_streams()
        self._num_cells += 1
        # This precedes the answer, because the code may have broken the shared memory.
        self._write_shared(self._pid, self._checkpoint, call.nonce)
        write_answer(outcome, call.nonce, self._num_cells)
        self._write_shared(self._pid, self._checkpoint, 0)
        if pure and self._is_replayable and outcome[0] != "memory":
            self._cells_since_checkpoint += 1
            self._replay_cost_s += time.monotonic() - began_at
            return
        self._is_replayable = False
        if self._checkpoint and self._can_be_forked():  # otherwise, the next cell keeps the checkpoint
            self._kill_checkpoint()

    # ------------------------------------------------------------ checkpoints

    def _can_be_forked(self) -> bool:
        if not syscalls.is_single_threaded() or any(any(signal.getitimer(timer)) for timer in _TIMERS):
            return False
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def _make_checkpoint(self) -> bool:
        """Fork a checkpoint. Return True in the worker, even if the fork fails, and False in the resumed checkpoint."""
        self._kill_checkpoint()
        now = time.monotonic()
        mask = _set_signals(signal.SIG_BLOCK, _SIGNALS)
        try:
            child = syscalls.fork_sibling()
        except OSError:
            child = -1
        if child:
            _set_signals(signal.SIG_SETMASK, mask)
        if child > 0:
            if self._own_namespaces:  # stop the checkpoint before it copies pages; it ends with the base
                os.kill(child, signal.SIGSTOP)
            self._checkpoint, self._checkpoint_at = child, now
            self._is_replayable, self._cells_since_checkpoint, self._replay_cost_s = True, 0, 0.0
        if child:
            return True
        self._become_worker()
        while self._read_shared().worker != self._pid:
            signal.sigwait(_SIGNALS)
        self._report_worker_death()
        _discard_signals()
        _set_signals(signal.SIG_SETMASK, mask)
        return False

    def _kill_checkpoint(self) -> None:
        checkpoint, self._checkpoint, self._checkpoint_at = self._checkpoint, 0, 0.0
        self._is_replayable = False
        if checkpoint:
            try:
                os.kill(checkpoint, signal.SIGKILL)
            except OSError:  # the code has killed the checkpoint
                return

    def _become_worker(self) -> None:
        self._pid = os.getpid()
        os.setpgid(0, 0)  # a signal to the worker's process group must not reach the checkpoint
        if not self._own_namespaces:
            syscalls.die_with_parent(signal.SIGKILL)

    def _report_worker_death(self) -> None:
        shared = self._read_shared()
        self._write_shared(self._pid, 0, 0)
        if shared.nonce:  # 0: the worker ended between two cells, and the next call's `cells` will not match
            write_answer(["died", str(shared.exit_code)], shared.nonce, self._num_cells)

    def _read_shared(self) -> _SharedState:
        return _SharedState(*_SHARED_STATE.unpack(self._shared))

    def _write_shared(self, worker: int, checkpoint: int, nonce: int, exit_code: int = 0) -> None:
        self._shared[:] = _SHARED_STATE.pack(worker, checkpoint, nonce, exit_code)


def _resume_checkpoint(checkpoint: int) -> bool:
    """Resume the checkpoint as the next worker. Return False if there is no live checkpoint."""
    try:
        if not checkpoint or os.waitid(os.P_PID, checkpoint, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        os.kill(checkpoint, signal.SIGCONT)
    except (ChildProcessError, ProcessLookupError):
        return False
    return True


def _discard_signals() -> None:
    for _ in range(_MAX_PENDING_SIGNALS):
        if signal.sigtimedwait(_SIGNALS, 0) is None:
            return
