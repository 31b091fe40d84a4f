"""The process of the reward functions: `python -m tasks.rewards.reward_worker SETTINGS [--socket FD]`.

SETTINGS is RewardSettings as JSON. Without a socket it only loads the functions: exit code 0, or the error on stderr.
With one, it reads requests and writes answers, each a length and a MessagePack struct. Calls of async functions
overlap; sync functions run in one thread, one at a time. A sync function that exceeds its time limit cannot be
stopped: the process answers that call and exits, and its client sends the other calls to the next process.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

import msgspec

from bus.messages import AnswerSubmitted
from configs.errors import EXIT_UNUSABLE, UnusableInput
from engine.model.tokenizer import load_tokenizer
from tasks.rewards.finished_rollout import FinishedRollout, RolloutReader
from tasks.rewards.reward_functions import RewardFunction, RewardSettings, UnusableReward, load_reward_functions

LENGTH_BYTES = 4
EXIT_TIMED_OUT = 3
_MAX_TRACEBACK_CHARACTERS = 4000


class ScoreRequest(msgspec.Struct, frozen=True, array_like=True):
    number: int
    submission: AnswerSubmitted


class ScoreReply(msgspec.Struct, frozen=True, array_like=True):
    """Components of the reward, or a failure."""

    number: int
    components: dict[str, float] = {}
    failure: str = ""


READY = ScoreReply(0)  # sent once, after the imports


def encode_with_length(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class _TimedOut(Exception):
    def __init__(self, function: RewardFunction, limit_s: float) -> None:
        super().__init__(f"{function.name} took longer than {limit_s:g} s")
        self.blocks_thread = not function.is_async


class RewardWorker:
    def __init__(self, settings: RewardSettings, functions: list[RewardFunction], reader: RolloutReader) -> None:
        self._functions = functions
        self._limit_s = settings.time_limit_s
        self._rollout_reader = reader
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._thread_is_free = asyncio.Lock()
        self._calls: set[asyncio.Task[None]] = set()

    async def serve(self, connection: socket.socket) -> None:
        """Until the client closes the connection."""
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(encode_with_length(READY))
        decoder = msgspec.msgpack.Decoder(ScoreRequest)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                request = decoder.decode(await reader.readexactly(length))
                call = asyncio.create_task(self._answer(request, writer))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _answer(self, request: ScoreRequest, writer: asyncio.StreamWriter) -> None:
        components: dict[str, float] = {}
        failure, name, must_exit = "", "reading the trajectory", False
        try:
            rollout = self._rollout_reader.read(request.submission)
            for function in self._functions:
                name = function.name
                components |= await self._call(function, rollout)
        except _TimedOut as error:
            failure, must_exit = str(error), error.blocks_thread
        except UnusableReward as error:
            failure = str(error)
        except (Exception, SystemExit) as error:  # of the user's code
            sys.stderr.write(traceback.format_exc()[-_MAX_TRACEBACK_CHARACTERS:])
            failure = f"{name} raised {type(error).__name__}: {error}"
        writer.write(encode_with_length(ScoreReply(request.number, {} if failure else components, failure)))
        await writer.drain()
        if must_exit:
            os._exit(EXIT_TIMED_OUT)

    async def _call(self, function: RewardFunction, rollout: FinishedRollout) -> dict[str, float]:
        """Raises _TimedOut, UnusableReward, and what the function raises."""
        metrics: dict[str, float] = {}
        limit = asyncio.timeout(self._limit_s)
        try:
            if function.is_async:
                async with limit:
                    result = await function.call(rollout, metrics)
            else:
                loop = asyncio.get_running_loop()
                async with self._thread_is_free:
                    limit = asyncio.timeout(self._limit_s)
                    async with limit:
                        result = await loop.run_in_executor(self._thread, function.call, rollout, metrics)
        except TimeoutError:
            if not limit.expired():  # the function's own
                raise
            raise _TimedOut(function, self._limit_s) from None
        return function.parse_result(result, metrics)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tasks.rewards.reward_worker")
    parser.add_argument("settings")
    parser.add_argument("--socket", type=int)
    arguments = parser.parse_args()
    settings = msgspec.json.decode(arguments.settings, type=RewardSettings)
    try:
        functions = load_reward_functions(settings.functions)
        if arguments.socket is None:
            return 0
        tokenizer = load_tokenizer(settings.checkpoint)
        worker = RewardWorker(settings, functions, RolloutReader(tokenizer, settings.prefill, settings.stop_tokens))
    except UnusableInput as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNUSABLE
    connection = socket.socket(fileno=arguments.socket)
    connection.setblocking(False)
    asyncio.run(worker.serve(connection))
    return 0


if __name__ == "__main__":
    sys.exit(main())
