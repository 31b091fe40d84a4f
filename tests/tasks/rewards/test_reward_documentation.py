"""The examples of docs/rewards.md work."""

import re
import tomllib
from pathlib import Path

import pytest

from asterism.configs.load import load_run
from asterism.policies.tools.task_description import MATH
from asterism.tasks.rewards.finished_rollout import FinishedRollout
from asterism.tasks.rewards.reward_functions import load_reward_functions

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"
MESSAGES = [{"role": "assistant", "content": "<reason>I know.</reason><answer>\\boxed{5}</answer>"}]
ROW = {"question": "What is 2+3?", "ground_truth": "5"}
ROLLOUT = FinishedRollout(ROW, "answered", MESSAGES, "I know. 5", [1, 2, 3])


def test_the_examples_are_loaded_and_score(tmp_path: Path) -> None:
    code, toml, _ = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "rewards.py").write_text(code)
    (tmp_path / "run.toml").write_text(f'name = "some"\n{toml}')
    assert "reward" in tomllib.loads(toml)
    run = load_run(tmp_path / "run.toml")
    functions = {name: spec for name, spec in run.reward.functions.items() if spec != MATH}
    functions["verl"] = f"{tmp_path}/rewards.py:compute_score"
    components: dict[str, float] = {}
    for function in load_reward_functions(functions):
        components |= function.parse_result(function.function(**function.build_arguments(ROLLOUT, {})), {})
    assert components == {"format": 1.0, "length": pytest.approx(-0.0003), "verl": 1.0, "verl.characters": 9.0}


def test_the_example_of_unit_tests_is_loaded(tmp_path: Path) -> None:
    *_, toml = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "functions.jsonl").write_text(
        '{"question": "Add.", "entry_point": "add", "tests": "assert add(1, 2) == 3"}\n'
    )
    (tmp_path / "run.toml").write_text(f'name = "some"\n{toml}')
    (task,) = load_run(tmp_path / "run.toml").resolved_tasks
    (function,) = load_reward_functions(task.get_reward().functions)
    assert function.name == "tests"
