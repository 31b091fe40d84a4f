"""Verification replays the event logs while the run writes them, so that little is left at its end (`log.verify`)."""

import threading
import time
from collections.abc import Callable

import structlog

from asterism.actors.replay.replay import DECIDING_PROCESSES, LogReplay, ReplayResult, find_log, sum_results
from asterism.actors.runtime.wiring import build_deciders
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

FIRST_LOOK_S = 60.0  # seconds; a shorter run is replayed at its end
_LOOK_INTERVAL_S = 5.0  # seconds between two parts of the growing logs
_REPORT_INTERVAL_S = 5.0  # seconds between two lines about a long replay


class RunVerifier:
    """A thread replays the logs of a live run; `finish` replays the rest, `close` abandons it.

    With log.keep_steps the logs are replayed at the end only, because events may be removed before
    the thread reads them.
    """

    def __init__(self, run: RunConfig, folder: RunFolder, first_look_s: float = FIRST_LOOK_S) -> None:
        self._run, self._folder = run, folder
        self._interval_s = first_look_s
        self._run_ended = threading.Event()
        self._replays: list[LogReplay] = []
        self._thread = threading.Thread(target=self._follow_logs, name="verification", daemon=True)
        if run.log.events and run.log.verify and not run.log.keep_steps:
            self._thread.start()

    def finish(self, show: Callable[[str], None]) -> ReplayResult:
        """Replay the rest, after the last process has ended. Raises UnusableInput."""
        self._run_ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        began = time.monotonic()
        num_before = sum(each.num_events for each in self._replays)
        for process in DECIDING_PROCESSES[len(self._replays) :]:
            self._add_replay(process)
        num_left = sum(each.num_left for each in self._replays)
        show(f"replaying the event logs: {num_left:,} events, {num_before:,} already replayed during the run")
        last_report = began
        for replay in self._replays:

            def report() -> bool:
                nonlocal last_report
                if (now := time.monotonic()) - last_report >= _REPORT_INTERVAL_S:
                    num_done = sum(each.num_events for each in self._replays) - num_before
                    left_s = (now - began) * (num_left / num_done - 1) if num_done else 0.0
                    show(f"replayed {num_done:,} of {num_left:,} events, {left_s:.0f} s left")
                    last_report = now
                return True

            replay.catch_up(proceed=report)
        result = sum_results(self._replays)
        show(f"replayed in {time.monotonic() - began:.1f} s (log.verify = false skips this)")
        return result

    def close(self) -> None:
        """Stop the thread after its present part, and do not wait for it."""
        self._run_ended.set()

    def _follow_logs(self) -> None:
        try:
            while not self._run_ended.wait(self._interval_s):
                self._interval_s = _LOOK_INTERVAL_S
                self._replay_new_events()
        except Exception:  # this is the top of the thread: `finish` replays everything again
            self._replays = []
            structlog.get_logger().exception("verification.failed")

    def _replay_new_events(self) -> None:
        if not self._replays:
            if not all((self._folder.events / f"{process}.sqlite").exists() for process in DECIDING_PROCESSES):
                return
            if not self._folder.problem_counts.exists():
                return
            for process in DECIDING_PROCESSES:
                self._add_replay(process)
        for replay in self._replays:
            replay.catch_up(growing=True, proceed=lambda: not self._run_ended.is_set())

    def _add_replay(self, process: str) -> None:
        deciders = build_deciders(process, self._run, self._folder, lambda: not self._run_ended.is_set())
        self._replays.append(LogReplay(process, find_log(self._folder, process), deciders))
