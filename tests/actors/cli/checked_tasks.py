"""Tests check these tasks, which have code and rows, with `asterism task check`."""

CODE = '''
import asyncio, os, subprocess, threading, time
from random import Random

KEPT, RANDOM = [], Random(0)


def look_up(name: str, field: str = "age") -> str:
    """Look a person up.

    Args:
        name: The name.
        field: The field. (choices: ["age", "size"])
    """
    return f"{field} of {name}"


async def pause(seconds: int) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(0.1 * seconds)
    return "waited"


async def rest(seconds: int) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(0.1 * seconds)
    return "rested"


async def compute(code: str, sandbox) -> str:
    """Run a program.

    Args:
        code: The program.
    """
    return (await sandbox.run("print(6 * 7)")).stdout


TOOLS, PAUSES, COMPUTE = [look_up], [pause, rest], compute


class Counter:
    """An environment as in TRL."""

    replayable = True

    def __init__(self, low: int = 0):
        self.low = low

    def reset(self, start, **columns):
        self.value = self.low + start
        return f" It starts at {self.value}."

    def add(self, number: int) -> str:
        """Add to the counter.

        Args:
            number: The number to add.
        """
        return self._add(number)

    def _add(self, number):
        self.value += number
        return f"It is {self.value}."

    def get_reward(self):
        return float(self.value)


class Plain(Counter):
    replayable = False


class Kept(Counter):
    def reset(self, start, **columns):
        KEPT.append(self)
        return super().reset(start)


class Busy(Counter):
    def reset(self, start, **columns):
        threading.Thread(target=time.sleep, args=(20,), name="watch", daemon=True).start()
        subprocess.Popen(["sleep", "5"])
        return super().reset(start)


class Dice(Counter):
    def reset(self, start, **columns):
        super().reset(start)

    def roll(self) -> str:
        """Roll."""
        return str(RANDOM.randrange(10**9))


class Strict(Counter):
    def _add(self, number):
        raise ValueError("only even numbers")


class Slow(Counter):
    def _add(self, number):
        time.sleep(2)


class NeedsColumn(Counter):
    def reset(self, level):
        pass


class Dies(Counter):
    def _add(self, number):
        os._exit(7)


class Echo:
    replayable = True

    def init(self, row):
        self.start = row["start"]

    def step(self, message):
        said = message["content"]
        return {"messages": f"You said: {said}", "done": said.endswith("2"), "rewards": {"start": self.start}}


def score_answer(completions, ground_truth, **columns):
    return [float(ground_truth[0] in completions[0][-1]["content"])]


def score_length(completions, **columns):
    return [1.0]


def fail(completions, **columns):
    raise RuntimeError("no reward today")
'''
ROWS = [{"question": f"Count to {number}.", "answer": str(number), "start": number} for number in (5, 6, 7, 8)]
