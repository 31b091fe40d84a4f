"""An environment from TRL's documentation and a reward from verl's documentation run unchanged."""

from pathlib import Path

import msgspec
import pytest

from asterism.bus import messages as msg
from asterism.policies.tools.tool_arguments import check_arguments
from asterism.tasks.hosting.loaded_task import LoadedTask
from asterism.tasks.hosting.wire import HostSettings
from tests.tasks.hosting.hosts import open_pool

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

# The form of verl/docs/preparation/reward_function.rst and verl/utils/reward_score/gsm8k.py.
VERL_REWARD = """
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    solution = re.search("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
    final = None if solution is None else solution.group(0).split("#### ")[1].replace(",", "")
    return 1.0 if final == ground_truth else 0.0
"""


def submit(trajectory_id: int, row: dict[str, object], response: str, checkpoint: Path) -> msg.AnswerSubmitted:
    from asterism.engine.model.tokenizer import load_tokenizer

    ids = load_tokenizer(checkpoint).encode(response, trusted=True)
    tokens = msg.RewardInput("answered", msgspec.json.encode(row), 0, msg.ids_to_bytes(ids), bytes([1]) * len(ids))
    return msg.AnswerSubmitted(trajectory_id, "", str(row.get("ground_truth", "")), tokens, "t")


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
    async with open_pool(settings, description) as pool:
        for trajectory_id, steps in ((0, (3, 4)), (1, (3,))):
            row: dict[str, object] = {"question": "Go. ", "amount": 7}
            opened = await pool.call(
                msg.EnvironmentCalled(trajectory_id, msg.OPENING_CALL, "t", "", msgspec.json.encode(row))
            )
            assert opened.outcome == msg.Observation("Go. Increment the counter by 7.")
            for step in steps:
                arguments = msgspec.json.encode({"step": step})
                returned = await pool.call(msg.EnvironmentCalled(trajectory_id, 0, "t", "increment", arguments))
            assert returned.outcome == msg.Observation(str(sum(steps)))
            scored = await pool.score(submit(trajectory_id, row, "done", checkpoint))
            assert scored.components == {"counter": float(sum(steps) == 7)}


async def test_a_reward_written_for_verl_runs_unchanged(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "gsm8k.py").write_text(VERL_REWARD)
    functions = {"gsm8k": f"{tmp_path}/gsm8k.py:compute_score"}
    row: dict[str, object] = {"question": "?", "ground_truth": "1234", "data_source": "openai/gsm8k"}
    async with open_pool(HostSettings("t", functions=functions, checkpoint=str(checkpoint))) as pool:
        for response, score in (("It is #### 1,234", 1.0), ("#### 12", 0.0), ("1234", 0.0)):
            assert (await pool.score(submit(0, row, response, checkpoint))).components == {"gsm8k": score}
