"""Messages between an executor and its host processes. Each message is a length and a MessagePack struct."""

import asyncio
from typing import Any

import msgspec

from asterism.bus.messages import AnswerSubmitted, EnvironmentOutcome
from asterism.policies.tools.task_description import TaskDescription

LENGTH_BYTES = 4


class HostSettings(msgspec.Struct, frozen=True):
    """The settings of a host process, with which it loads a task."""

    task: str = ""  # name of the task; empty without [[tasks]]
    import_path: str = ""
    parameters: dict[str, Any] = {}
    functions: dict[str, str] = {}  # import paths of reward functions by component
    checkpoint: str = ""  # folder of the tokenizer, for reward functions
    call_limit_s: float = 30.0  # limit of a call of a tool, `reset`, `init`, `step`, `get_reward` and `close`
    reward_limit_s: float = 60.0  # limit of a call of a reward function
    prefill: str = ""  # start of each assistant turn
    stop_tokens: tuple[str, ...] = ()
    max_characters: int = 1 << 18  # limit of a text for the model; the middle of a longer text is cut
    secrets: dict[str, str] = {}  # references `${NAME}` by secret value; messages show the reference

    @property
    def name_key(self) -> str:
        """The prefix of this task's configuration keys."""
        return f"tasks.{self.task}." if self.task else ""


class HostMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int  # number of the request


class Open(HostMessage, frozen=True):
    """Create the trajectory's instance, and reset it."""

    trajectory_id: int
    row: bytes  # a JSON object


class Call(HostMessage, frozen=True):
    """Call a tool, or `step` of a dialogue."""

    trajectory_id: int
    method: str
    arguments: bytes  # a JSON object


class Score(HostMessage, frozen=True):
    submission: AnswerSubmitted


class Close(HostMessage, frozen=True):
    """Close the trajectory's instance. The message has no answer."""

    trajectory_id: int


class Inspect(HostMessage, frozen=True):
    """Report on the task's code. The first request starts the measurement of the event loop's delays."""


class ProgramEnded(HostMessage, frozen=True):
    """The answer to RunProgram."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    fault: str = ""


class Ready(HostMessage, frozen=True):
    """The first message of a host process, after the imports."""

    description: TaskDescription


class Alive(HostMessage, frozen=True):
    """The message sent every second while requests are open: the interpreter is not blocked."""


class Returned(HostMessage, frozen=True):
    """The answer to Open and Call."""

    outcome: EnvironmentOutcome
    duration_s: float


class Scored(HostMessage, frozen=True):
    components: dict[str, float]  # components of the reward functions
    environment: dict[str, float]  # components of `get_reward`


class Inspected(HostMessage, frozen=True):
    """The answer to Inspect, sent when no instance is being closed."""

    live_instances: int  # number of objects of the task's class
    threads: tuple[str, ...]  # names of threads, without the main thread and thread pools
    children: tuple[str, ...]  # command lines of child processes
    delays_s: dict[str, list[float]]  # largest delay of the event loop in each call, by function


class Failed(HostMessage, frozen=True):
    """A failure of the infrastructure or of the task's code. Number 0: the process could not load the task."""

    cause: str


class RunProgram(HostMessage, frozen=True):
    trajectory_id: int
    code: str
    stdin: str


HostRequest = Open | Call | Score | Close | Inspect | ProgramEnded
HostReply = Ready | Alive | Returned | Scored | Inspected | Failed | RunProgram

request_decoder = msgspec.msgpack.Decoder(HostRequest)
reply_decoder = msgspec.msgpack.Decoder(HostReply)


def encode_with_length(message: HostMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class BatchWriter:
    """Writes all messages of one iteration of the event loop at once, because a system call takes as long as a short
    call of a tool."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._frames: list[bytes] = []  # bounded by the requests in flight

    def write(self, frame: bytes) -> None:
        """Write a frame of encode_with_length."""
        if not self._frames:
            self._loop.call_soon(self._write_all)
        self._frames.append(frame)

    async def flush(self) -> None:
        self._write_all()
        await self._writer.drain()

    def _write_all(self) -> None:
        if self._frames:
            self._writer.write(b"".join(self._frames))
            self._frames.clear()


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """Read one message. Raises IncompleteReadError and ConnectionError at the end of the connection."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little"))
