"""An OpenEnv server as a dialogue: each turn of the model is an action, and each observation is the user's answer.

    import = "asterism.tasks.bridges.openenv_dialogue:OpenEnvDialogue"
    parameters = { url = "http://127.0.0.1:8000", action_field = "message", observation_fields = ["text"] }

The task implements the protocol of OpenEnv's WebSocket endpoint /ws, without a package of OpenEnv.
"""

import json
from collections.abc import Mapping
from typing import Any

from asterism.tasks.bridges.openenv_session import ActionRefused, OpenEnvSession
from asterism.tasks.contract import Fault, Opening, Reply

REWARD = "environment"  # component of the reward
REFUSED = "environment_errors"  # metric: number of actions that the server refused
_METADATA = "metadata"


class OpenEnvDialogue:
    """A dialogue task with a session of an OpenEnv server for each rollout.

    url: address of the server, such as http://127.0.0.1:8000.
    action_field: field of the action for the model's text.
    observation_fields: fields of the observation for the model's prompt; None: the whole observation as JSON.
    reset: arguments of the environment's `reset`, without `seed`, which comes from the row's column `seed`.
    time_limit_s: longest wait for the connection, and for each answer.
    """

    replayable = False  # an environment can draw random numbers

    def __init__(
        self,
        url: str,
        action_field: str = "message",
        observation_fields: list[str] | None = None,
        reset: dict[str, Any] | None = None,
        time_limit_s: float = 30.0,
    ) -> None:
        """Check the parameters. Raises ValueError."""
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"`url` must start with http://, https://, ws:// or wss://; got {url!r}")
        if time_limit_s <= 0:
            raise ValueError(f"`time_limit_s` must be positive; got {time_limit_s}")
        if observation_fields == []:
            raise ValueError("`observation_fields` is empty; name a field, or remove it to show the whole observation")
        self._session = OpenEnvSession(url, time_limit_s)
        self._action_field, self._fields, self._reset = action_field, observation_fields, reset or {}

    async def init(self, row: Mapping[str, Any]) -> Opening:
        """Open the session and reset the environment. Raises Fault."""
        await self._session.open(self._action_field)
        seed = {} if row.get("seed") is None else {"seed": row["seed"]}
        try:
            begun = await self._session.request("reset", {**self._reset, **seed})
        except ActionRefused as error:
            raise Fault(f"{self._session.url}: reset failed: {error}") from error
        if begun.done:
            raise Fault(f"{self._session.url}: the episode is done after reset; check `reset` and the column `seed`")
        return Opening(messages=self._render(begun.observation))

    async def step(self, message: Mapping[str, Any]) -> Reply:
        """Send a turn as an action. A refused action becomes an error text for the model. Raises Fault."""
        try:
            stepped = await self._session.request("step", {self._action_field: message["content"]})
        except ActionRefused as error:
            return Reply(messages=f"Error: {error}", metrics={REFUSED: 1.0})
        rewards = {} if stepped.reward is None else {REWARD: float(stepped.reward)}
        return Reply(messages=self._render(stepped.observation), done=stepped.done, rewards=rewards)

    async def close(self) -> None:
        """End the session, and wait until the server has closed the environment, if the server answers."""
        await self._session.close()

    def _render(self, observation: dict[str, Any]) -> str:
        """Return the value of one field, lines `field: value` of several fields, or the whole observation as JSON."""
        if self._fields is None:
            shown = {field: value for field, value in observation.items() if field != _METADATA}
            return json.dumps(shown, ensure_ascii=False)
        for field in self._fields:
            if field not in observation:
                known = ", ".join(observation)
                raise Fault(
                    f"`observation_fields`: the observation of {self._session.url} has no {field}; it has {known}"
                )
        texts = [_render_value(observation[field]) for field in self._fields]
        if len(texts) == 1:
            return texts[0]
        return "\n".join(f"{field}: {text}" for field, text in zip(self._fields, texts, strict=True))


def _render_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
