"""Ends the processes of calls and notebooks, and finds the cause of an exit."""

import os
import signal

from asterism.sandbox.inside.call.notebook_process import FORK_FAILED_EXIT_CODE
from asterism.sandbox.inside.server.call_process_handle import CallProcess, NotebookProcesses
from asterism.sandbox.inside.server.orphan_reaper import kill_groups
from asterism.sandbox.inside.server.proc_usage import ProcessUsage
from asterism.sandbox.inside.server.process_tree import ProcessTree
from asterism.sandbox.inside.wire.call_wire import CallOutcome
from asterism.sandbox.inside.wire.server_settings import ServerSettings

_KILLED = ["died", str(-signal.SIGKILL)]
_OOM_KILLED = ["failed", "the kernel killed a call below its memory limit"]


class CallKiller:
    """Kills processes. The exit of a call's first process triggers the answer to the call."""

    def __init__(self, notebooks: NotebookProcesses, process_tree: ProcessTree, own_namespaces: bool) -> None:
        self._notebooks = notebooks
        self._process_tree = process_tree
        self._own_namespaces = own_namespaces

    def stop(self, child: CallProcess) -> None:
        """Kill the call. A notebook rolls back to the state before the call, if possible."""
        if child.notebook_id is None or child.rolling_back or not self._notebooks.kill_cell(child):
            self.kill(child)
        else:
            child.rolling_back = True

    def fail(self, child: CallProcess, error: OSError) -> None:
        """End a call or notebook after the machine has refused descriptors or memory to the fork server.

        Raises the error of a lost connection to the executor or to the zygote.
        """
        if isinstance(error, ConnectionError):
            raise error
        child.outcome = child.outcome or ["failed", f"the fork server could not serve a call: {error.strerror}"]
        self.kill(child)

    def kill(self, child: CallProcess | None) -> None:
        """Kill the process and its descendants, unless they have ended."""
        if child is None:
            return
        self._notebooks.discard(child)
        child.killed = True
        groups = () if self._own_namespaces else (child.pid, *self._process_tree.list_children(child.pid))
        os.kill(child.pid, signal.SIGKILL)
        kill_groups(*groups)


class ExitClassifier:
    """Finds the cause of a process's exit: its code, one of its limits, or a lack of resources on the machine."""

    def __init__(self, settings: ServerSettings, own_namespaces: bool, usage: ProcessUsage) -> None:
        self._settings = settings
        self._own_namespaces = own_namespaces
        self._usage = usage

    def classify(self, child: CallProcess, exit_code: int, cpu_s: float) -> CallOutcome:
        if exit_code == -signal.SIGKILL and not child.killed:
            if self._own_namespaces and cpu_s > self._settings.time_limit_s:
                return ["timeout"]
            if child.cgroup is None and self._was_oom_killed(child):
                return _OOM_KILLED
            if self._own_namespaces and child.cgroup is None:  # only the kernel can kill process 1
                return ["memory"]
        if exit_code == FORK_FAILED_EXIT_CODE and child.notebook_id is not None:
            return ["failed", "a notebook could not fork"]
        if exit_code > 0 and not child.has_begun:
            return ["failed", "a call could not be isolated"]
        return ["died", str(exit_code)]

    def correct_for_oom_kill(self, child: CallProcess, outcome: CallOutcome) -> CallOutcome:
        """Return the outcome, or its correction if the kernel killed a process of the call for lack of memory."""
        was_killed = outcome in (_KILLED, _OOM_KILLED)
        if not was_killed and not (child.cgroup and child.pipes_polled):  # a call this short cannot fill its cgroup
            return outcome
        found = self.find_oom_kill(child)
        if found == _OOM_KILLED and not was_killed:  # the call continued without one of its children
            return outcome
        return found or outcome

    def find_oom_kill(self, child: CallProcess) -> CallOutcome | None:
        """Return the outcome if the kernel, not the fork server, killed a process of the call for lack of memory."""
        if child.exceeded_limit is not None or child.killed:
            return None
        if child.cgroup is None:
            return _OOM_KILLED if self._was_oom_killed(child) else None
        return {"call": ["memory"], "machine": _OOM_KILLED, None: None}[child.cgroup.find_culprit()]

    def _was_oom_killed(self, child: CallProcess) -> bool:
        """Return whether a full machine or container killed a call below its memory limit."""
        return child.memory_bytes <= self._settings.memory_mib << 20 and self._usage.take_oom_kill()
