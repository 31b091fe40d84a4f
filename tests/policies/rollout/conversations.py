"""One trajectory with the tools, environment or dialogue of a task, for tests of its transitions."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from asterism.bus import messages as msg
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.decider import Send
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import Rules
from asterism.policies.tools.task_description import TaskDescription, TaskKind
from asterism.policies.tools.tool_schema import ToolSchema
from tests.fakes import TOKENIZER, generated, rules, start_group

M = TypeVar("M")
FIRST, SECOND = "executor-0/1", "executor-1/1"
ROW = b'{"question":"How many?"}'
LOOK = ToolSchema("look", "Look.", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]})


def ask(*places: str) -> str:
    """Return a turn with one call for each place."""
    return "".join(
        f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{place}"}}}}\n</tool_call>' for place in places
    )


class Conversation:
    """A rollout with the tasks "tools", "environment" and "dialogue", and one started group."""

    def __init__(
        self,
        kind: TaskKind = "environment",
        size: int = 1,
        executors: Mapping[str, int] | None = None,
        **changes: object,
    ) -> None:
        """`executors` has the number of slots of each executor; the default is FIRST. `changes` are fields of the rules."""
        kinds: tuple[TaskKind, ...] = ("tools", "environment", "dialogue")
        self.rollout = Rollout({each: self._make_rules(each, changes) for each in kinds})
        self.kind, self.now = kind, 0.0
        for name, slots in ({FIRST: 4} if executors is None else executors).items():
            self.decide(msg.ExecutorJoined(name, slots))
        self.started = self.decide(make_group(kind, size))

    @staticmethod
    def _make_rules(kind: TaskKind, changes: dict[str, object]) -> Rules:
        tools = () if kind == "dialogue" else (LOOK,)
        description = TaskDescription(kind, tools, has_reward=kind == "environment")
        python_tools = () if kind == "dialogue" else ("jupyter_code",)
        dialogue = build_dialogue_format(DialogueConfig(tools=python_tools), description)
        return rules(**{"dialogue": dialogue, "kind": kind, "max_calls_per_turn": 2, **changes})

    def decide(self, event: msg.AnyMessage) -> list[Send]:
        self.now += 1.0
        return list(self.rollout.decide(self.now, event))

    def answer(
        self, call: int, outcome: msg.EnvironmentOutcome | str, executor: str = FIRST, trajectory_id: int = 0
    ) -> list[Send]:
        outcome = msg.Observation(outcome) if isinstance(outcome, str) else outcome
        return self.decide(msg.EnvironmentReturned(trajectory_id, call, outcome, 0.5, executor))

    def fail(self, call: int, cause: str = "environment: down", executor: str = FIRST) -> list[Send]:
        return self.decide(msg.CallFailed(0, call, cause, executor))

    def say(self, text: str, trajectory_id: int = 0) -> list[Send]:
        """Grant the requested lease, and generate the next turn."""
        trajectory = self.rollout.trajectories[trajectory_id]
        lease = trajectory.lease + 1
        self.decide(msg.LeaseGranted(trajectory_id, "generator-0", 4000, lease, 0.0, ""))
        return self.decide(generated(trajectory_id, trajectory.turn, text, lease=lease))

    def finish_code(self, call: int, output: str = "", executor: str = FIRST, trajectory_id: int = 0) -> list[Send]:
        outcome = msg.CodeOk(msg.Output(output))
        return self.decide(msg.CodeFinished(trajectory_id, call, outcome, 0.1, executor))

    def grade(self, reward: float = 0.5, executor: str = FIRST) -> msg.TrajectoryFinished:
        return find(self.decide(msg.AnswerGraded(0, reward, 0.1, executor, {"x": reward})), msg.TrajectoryFinished)

    @property
    def text(self) -> str:
        return TOKENIZER.decode(msg.bytes_to_ids(self.rollout.trajectories[0].record.token_ids))


def open_room(*turns: str, **changes: object) -> Conversation:
    """Return a conversation after the opening of its environment and these turns of the model."""
    made = Conversation(**changes)  # pyright: ignore[reportArgumentType]
    made.answer(msg.OPENING_CALL, "room")
    for turn in turns:
        made.say(turn)
    return made


def make_group(task: str, size: int = 1, group_id: int = 0, first: int = 0) -> msg.StartGroup:
    return start_group(size, first, group_id=group_id, row=ROW, task=task)


def find(sends: list[Send], kind: type[M]) -> M:
    """Return the only message of this kind."""
    (found,) = [send.message for send in sends if isinstance(send.message, kind)]
    return found


def called(call: int, method: str = "look", to: str = FIRST, task: str = "environment", **arguments: str) -> Send:
    return Send(to, msg.EnvironmentCalled(0, call, task, method, msgspec.json.encode(arguments)))


def opened(to: str = FIRST, task: str = "environment") -> Send:
    return Send(to, msg.EnvironmentCalled(0, msg.OPENING_CALL, task, "", ROW))
