"""Stops all processes of a call or of an idle notebook, and verifies that they stay stopped.

SIGSTOP is sent to each process, because children may leave their process group. A scan can miss a process that starts
meanwhile, and a stopped process can continue: a sibling or one of its timers can send SIGCONT. Scans repeat until two
of them agree that no process runs. From then on, the CPU clocks of
the processes show whether a process continues, at a fraction of the cost of a scan.
"""

import os
import signal

from asterism.sandbox.inside.server.call_process_handle import CallProcess
from asterism.sandbox.inside.server.proc_usage import ProcessUsage

_STOPPED, _RUNNABLE = b"T", (b"R", b"S")
_FIRST_INTERVAL_S, _MAX_INTERVAL_S = 0.01, 1.0


class ProcessHold:
    """Keeps the processes of one call or notebook stopped, except a notebook's first process.

    The processes first get `spare_cpu_s` of CPU time, in which a worker ends its checkpoint after its answer.
    """

    def __init__(self, child: CallProcess, usage: ProcessUsage, spare_cpu_s: float = 0.0) -> None:
        self._child = child
        self._usage = usage
        self._stopped: set[int] = set()  # processes that this hold stopped; others were stopped before
        self._spare_cpu_s = spare_cpu_s
        self._first_cpu_s: float | None = None
        self._interval_s = _FIRST_INTERVAL_S
        self._cpu_s: float | None = None  # CPU time of `pids` since two scans agreed
        self.pids: list[int] = []
        self.num_escapes = -1  # scans that found a running process, after the first one

    @property
    def is_verified(self) -> bool:
        return self._cpu_s is not None

    def check(self) -> float:
        """Stop running processes. Return the seconds until the next check."""
        if self._spare_cpu_s and self._may_run_on():
            return _FIRST_INTERVAL_S
        self._spare_cpu_s = 0.0
        if self._cpu_s is not None:
            if self._usage.measure_cpu_s(self.pids) == self._cpu_s:
                return _MAX_INTERVAL_S
            self._cpu_s, self._interval_s = None, _FIRST_INTERVAL_S
        before = self.pids
        if self._stop_running():
            self.num_escapes += 1
        elif self.pids == before:
            self._cpu_s = self._usage.measure_cpu_s(before)
        self._interval_s = min(2 * self._interval_s, _MAX_INTERVAL_S)
        return self._interval_s

    def _may_run_on(self) -> bool:
        pids = self._list_pids()
        cpu_s = self._usage.measure_cpu_s(pids)
        self._first_cpu_s = cpu_s if self._first_cpu_s is None else self._first_cpu_s
        return cpu_s - self._first_cpu_s < self._spare_cpu_s and any(
            self._usage.read_state(pid) == b"R" for pid in pids
        )

    def _list_pids(self) -> list[int]:
        family = self._usage.list_process_tree(self._child.pid)
        return family if self._child.notebook_id is None else family[1:]

    def _stop_running(self) -> bool:
        """Stop the running processes. Return whether there were any."""
        self.pids = self._list_pids()
        running = [pid for pid in self.pids if self._is_running(pid)]
        for pid in running:
            _send_signal(pid, signal.SIGSTOP)
        self._stopped.update(running)
        return bool(running)

    def _is_running(self, pid: int) -> bool:
        """Return whether a process runs. If its first thread has ended or is in `vfork`, other threads can run once."""
        state = self._usage.read_state(pid)
        return state in _RUNNABLE or (state != _STOPPED and pid not in self._stopped)

    def release(self) -> None:
        for pid in self._stopped:
            _send_signal(pid, signal.SIGCONT)


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
