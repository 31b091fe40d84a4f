"""An OpenEnv server of a guessing game. `openenv_server.py MAX_SESSIONS` serves a loopback port, and prints the port.

Runs in .venv-bridges. The environment is created with `create_app`, as the servers of OpenEnv do.
"""

# Types are checked in .venv, which lacks these packages.
# pyright: basic, reportMissingImports=false

import socket
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class Guess(Action):
    message: str = Field(max_length=20)


class Hint(Observation):
    text: str
    tries: int


class GuessingGame(Environment[Guess, Hint, State]):
    """A game in which the number is the seed. A right guess has reward 1, a wrong guess -0.25; "wait" never returns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, name: str = "", **_: Any) -> Hint:
        self._number, self._tries = seed or 0, 0
        return Hint(text=f"Guess, {name}!" if name else "Guess!", tries=0)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.message == "wait":
            time.sleep(1000)
        guess = int(action.message)
        self._tries += 1
        if guess == self._number:
            return Hint(text="right", tries=self._tries, done=True, reward=1)
        return Hint(text="higher" if guess < self._number else "lower", tries=self._tries, reward=-0.25)

    @property
    def state(self) -> State:
        return State(step_count=self._tries)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    app = create_app(GuessingGame, Guess, Hint, env_name="guess", max_concurrent_envs=int(sys.argv[1]))
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
