"""An environment and a reward from TRL's documentation run unchanged."""

from pathlib import Path

import msgspec
import pytest

from asterism.bus import messages as msg
from asterism.policies.tools.tool_arguments import check_arguments
from asterism.tasks.hosting.loaded_task import LoadedTask
from asterism.tasks.hosting.wire import HostSettings
from tests.tasks.hosting.hosts import open_pool, submit

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

# The form of trl/docs/source/grpo_trainer.md, "Agent training with environments": the instance has the state,
# and the reward function reads it from `environments`.
TRL_ENVIRONMENT = '''
class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        return f"Increment the counter by {kwargs['amount']}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def reward_counter(completions, environments, amount, **kwargs):
    return [1.0 if env.counter == wanted else 0.0 for env, wanted in zip(environments, amount)]
'''


async def test_an_environment_and_a_reward_written_for_trl_run_unchanged(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "trl.py").write_text(TRL_ENVIRONMENT)
    functions = {"counter": f"{tmp_path}/trl.py:reward_counter"}
    settings = HostSettings("t", f"{tmp_path}/trl.py:IncrementEnv", functions=functions, checkpoint=str(checkpoint))
    description = await LoadedTask(settings).describe()
    (tool,) = description.tools
    assert (description.kind, tool.name, tool.description) == (
        "environment",
        "increment",
        "Increment the internal counter.",
    )
    assert check_arguments({"step": 3}, tool.parameters) == {"step": 3}
    row: dict[str, object] = {"question": "Go. ", "amount": 7}
    async with open_pool(settings, description) as pool:
        for number, steps in enumerate(((3, 4), (3,))):
            opened = await pool.call(msg.EnvironmentCalled(number, msg.OPENING_CALL, "t", "", msgspec.json.encode(row)))
            assert opened.outcome == msg.Observation("Go. Increment the counter by 7.")
            for step in steps:
                arguments = msgspec.json.encode({"step": step})
                returned = await pool.call(msg.EnvironmentCalled(number, 0, "t", "increment", arguments))
            assert returned.outcome == msg.Observation(str(sum(steps)))
            scored = await pool.score(submit(checkpoint, row, "done", trajectory_id=number))
            assert scored.components == {"counter": float(sum(steps) == 7)}
