"""Writes event logs as a run does, from real deciders and scripted engines, tools and graders."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from asterism.actors.replay.replay import ReplayedTrajectory, ResultOverride, replay_trajectory
from asterism.actors.runtime.decider_loop import decide_event, get_trajectory_ids
from asterism.bus import messages as msg
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages.run import BufferCursor
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.engine.data.task_inputs import write_task_descriptions
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.decider import Decider
from asterism.policies.rollout.rollout import Rollout
from asterism.tasks.math_python import MATH_PYTHON
from tests.fakes import ANSWER, CALL, generated, rules, start_group
from tests.simulation.world import World

EXECUTOR = "executor-0/1"


def deciders(**rule_changes: object) -> dict[str, Decider]:
    """Build new deciders, by address."""
    made = rules(**rule_changes)
    return {"head/arbiter": Arbiter("worst_case", made.response_tokens), "rollout-0": Rollout({"": made})}


class Recording:
    """A rollout process and an arbiter that log the messages that they receive, as in a run. Messages to the buffer are
    only logged."""

    def __init__(self, folder: RunFolder, *, tick_s: float = 0.25, **rule_changes: object) -> None:
        folder.events.mkdir(parents=True)
        self._logs = {name: EventLog(folder.events / f"{name}.sqlite") for name in ("head", "rollout-0")}
        self._deciders = deciders(**rule_changes)
        self._tick_s = tick_s
        self.now = 100.0
        self.turns: list[msg.TurnRequested] = []
        self.calls: list[msg.CodeRequested | msg.AnswerSubmitted] = []

    def tell(self, to: str, message: msg.AnyMessage, sender: str = "x") -> None:
        self.now += self._tick_s
        process, _, actor = to.partition("/")
        envelope = msg.Envelope(sender, to, message)
        kind, about, frame = type(message).__name__, get_trajectory_ids(message), encode(envelope)
        seq = self._logs[process].append(self.now, actor or process, sender, kind, about, frame)
        if to not in self._deciders:
            return
        decided = decide_event(self._deciders[to], envelope, self.now)
        assert not isinstance(decided.effects, str), decided.effects
        self._logs[process].append_decision(seq, *decided.fingerprints)
        for effect in decided.effects:
            if isinstance(effect.message, msg.TurnRequested):
                self.turns.append(effect.message)
            elif isinstance(effect.message, msg.CodeRequested | msg.AnswerSubmitted):
                self.calls.append(effect.message)
            elif effect.to in (*self._deciders, "head/buffer"):
                self.tell(effect.to, effect.message, to)

    def begin(self) -> None:
        self.tell("head/arbiter", msg.RunStarted(0, BufferCursor()), "head")
        self.tell("head/buffer", msg.RunStarted(0, BufferCursor()), "head")
        self.tell("rollout-0", msg.RunStarted(0, BufferCursor()), "rollout-0")
        self.tell("rollout-0", msg.ExecutorJoined(EXECUTOR, 4), "launcher")
        self.tell("head/arbiter", msg.EngineJoined("generator-0", 65_536, 16, 0), "generator-0")

    def work(self, sayings: Mapping[tuple[int, int], str], output: str = "4") -> None:
        """Finish all turns and calls.

        `sayings` has the text by (trajectory, turn); other turns have the text ANSWER. Each call prints `output`.
        """
        while self.turns or self.calls:
            if self.turns:
                turn = self.turns.pop(0)
                text = sayings.get((turn.trajectory_id, turn.turn), ANSWER)
                said = generated(turn.trajectory_id, turn.turn, text, lease=turn.lease)
                self.tell("rollout-0", said, "generator-0")
            else:
                self.answer(self.calls.pop(0), msg.CodeOk(msg.Output(output)))

    def answer(self, call: msg.CodeRequested | msg.AnswerSubmitted, outcome: msg.CodeOutcome) -> None:
        if isinstance(call, msg.CodeRequested):
            self.tell("rollout-0", msg.CodeFinished(call.trajectory_id, call.call, outcome, 0.01, EXECUTOR), EXECUTOR)
        else:
            self.tell("rollout-0", msg.AnswerGraded(call.trajectory_id, 1.0, 0.01, EXECUTOR), EXECUTOR)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


def write_world_logs(world: World, path: Path, launches: int = 1) -> RunFolder:
    """Write a run folder with the logs of a simulated run. Each launch repeats the same events."""
    folder = RunFolder(path)
    for process, kept in world.logs.items():
        log = EventLog(folder.events / f"{process}.sqlite")
        for event in kept.events * launches:
            seq = log.append(event.time, event.actor, event.sender, event.kind, event.trajectory, event.frame)
            decision = kept.decisions[event.seq]
            log.append_decision(seq, decision.effects, decision.state)
        log.close()
    write_resolved(world.run, folder.config)
    write_task_descriptions(folder, dict.fromkeys([task.name for task in world.run.resolved_tasks], MATH_PYTHON))
    return folder


def small_run(folder: RunFolder, *, output: str = "4", tick_s: float = 0.25) -> RunFolder:
    """Record trajectories 7 and 8 on one question. Trajectory 7 calls the tool once, and both answer."""
    recording = Recording(folder, tick_s=tick_s)
    recording.begin()
    recording.tell("rollout-0", start_group(2), "head/buffer")
    recording.work({(7, 0): CALL}, output)
    recording.close()
    return folder


# ---------------------------------------------------------------- one trajectory of three turns

TID = 8
GROUP = start_group(1, TID, group_id=3)
RULES = rules(max_calls_per_turn=2)
THREE_TURNS = (CALL, CALL + CALL, ANSWER)
SEVEN = msg.CodeOk(msg.Output("seven"))


def record_trajectory(
    recording: Recording, texts: Sequence[str] = THREE_TURNS, first_outcome: msg.CodeOutcome = SEVEN
) -> None:
    """Record a trajectory whose calls print "seven", "eight" and "nine". The last call of a turn ends first."""
    outcomes = (first_outcome, msg.CodeOk(msg.Output("eight")), msg.CodeOk(msg.Output("nine")))
    recording.begin()
    recording.tell("rollout-0", GROUP, "head/buffer")
    for text in texts:
        turn = recording.turns.pop()
        recording.tell("rollout-0", generated(TID, turn.turn, text, lease=turn.lease), "generator-0")
        while recording.calls:
            call = recording.calls.pop()
            recording.answer(call, outcomes[call.call] if isinstance(call, msg.CodeRequested) else SEVEN)


def replay_recorded(
    texts: Sequence[str] = THREE_TURNS,
    first_outcome: msg.CodeOutcome = SEVEN,
    tool_result: ResultOverride | None = None,
) -> ReplayedTrajectory:
    with TemporaryDirectory() as path:
        folder = RunFolder(Path(path) / "run")
        recording = Recording(folder, max_calls_per_turn=2)
        record_trajectory(recording, texts, first_outcome)
        recording.close()
        return replay_trajectory(folder.events / "rollout-0.sqlite", Rollout({"": RULES}), TID, tool_result)
