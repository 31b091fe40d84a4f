"""Each example is small, is determined by its seed, and teaches a tiny model its task in 30 steps."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest

from asterism.bus.messages import CodeOk, Output
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.sft_dialogues import count_sft_dialogues
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.tool_results import format_result
from asterism.tasks.contract import SandboxResult
from asterism.tasks.hosting.loaded_task import LoadedTask
from asterism.tasks.hosting.wire import HostSettings
from asterism.tasks.math_python import MATH_PYTHON
from tests.actors.runs.running import ASTERISM, ROOT, metrics

EXAMPLES = ("search", "programs", "guess")
MAX_LINES = 59  # sum of the lines of the Python file and of the configuration
MIN_RISE = 0.2  # rise of the mean reward in 30 steps


def write_data(name: str, folder: Path, seed: int = 0) -> Path:
    """Run the example's program. Return the folder of the files that it writes."""
    subprocess.run([sys.executable, ROOT / "examples" / f"{name}.py", str(seed)], cwd=folder, check=True)
    return folder / "runs" / "examples" / name


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_example(name: str) -> RunConfig:
    return load_run(ROOT / "examples" / f"{name}.toml")


def import_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_small(name: str) -> None:
    paths = [ROOT / "examples" / f"{name}{suffix}" for suffix in (".py", ".toml")]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= MAX_LINES


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_seed_determines_the_data(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / each for each in ("first", "again", "other")]
    contents: list[dict[str, bytes]] = []
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        folder.mkdir()
        contents.append({path.name: path.read_bytes() for path in write_data(name, folder, seed).iterdir()})
    first, again, other = contents
    assert first.keys() == {"rows.jsonl", "test.jsonl", "sft.jsonl"}
    assert first == again
    assert first["sft.jsonl"] != other["sft.jsonl"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_configuration_names_the_files_that_the_example_writes(name: str) -> None:
    run = load_example(name)
    (task,) = run.tasks
    folder = ROOT / "runs" / "examples" / name
    assert (task.name, run.name, run.rl.steps) == (name, name, 30)
    named = tuple(map(Path, (task.data, task.test, run.sft.data)))
    assert named == tuple(folder / f"{each}.jsonl" for each in ("rows", "test", "sft"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
async def test_the_cold_start_fits_the_task(name: str, tmp_path: Path) -> None:
    (task,) = load_example(name).resolved_tasks
    loaded = LoadedTask(HostSettings(name, task.import_path)) if task.import_path else None
    dialogue = build_dialogue_format(task.get_dialogue(), await loaded.describe() if loaded else MATH_PYTHON)
    path = write_data(name, tmp_path) / "sft.jsonl"
    assert count_sft_dialogues(path, {name: dialogue}, 100_000) == len(path.read_text().splitlines())


@pytest.mark.slow
def test_the_examples_python_results_equal_those_of_the_sandbox(tmp_path: Path) -> None:
    for row in read_rows(write_data("search", tmp_path) / "sft.jsonl")[:100]:
        *_, result, answer = row["messages"]
        assert result["content"] == format_result(CodeOk(Output(answer["content"] + "\n")), 256)


def test_a_complete_query_finds_its_fact() -> None:
    search = import_example("search").search
    assert search("size of Bara").startswith("The size of Bara is ")
    assert len(search("Bara", k=3).splitlines()) == 3


async def test_the_reward_of_a_program_is_its_share_of_passed_tests() -> None:
    class Sandbox:
        async def run(self, code: str) -> SandboxResult:
            assert code == "def f(x): return x\nfor x in [1, 2, 3, 4]:\n    print(f(x))"
            return SandboxResult("1\n2\n3\n", "", "the last test raised")

    completion = [{"role": "assistant", "content": "def f(x): return x"}]
    score = import_example("programs").score
    assert await score([completion], [[1, 2, 3, 4]], [[1, 0, 3, 4]], Sandbox()) == [0.5]


def test_an_early_guess_has_a_larger_reward() -> None:
    game = import_example("guess").Game()
    game.init({"number": 4})
    replies = [game.step({"role": "assistant", "content": f"Any {guess}"}) for guess in (2, 7, 4)]
    assert [reply["messages"] for reply in replies] == ["higher", "lower", "right"]
    assert replies[2]["rewards"]["guess"] == pytest.approx(0.8)
    assert [reply.get("done", False) for reply in replies] == [False, False, True]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_thirty_steps_raise_the_reward_of_a_tiny_model(name: str, seed: int, tmp_path: Path) -> None:
    data = write_data(name, tmp_path, seed)
    settings = (
        f"seed={seed}",
        f"runs_folder={tmp_path}",
        f"sft.data={data / 'sft.jsonl'}",
        f"tasks.{name}.data={data / 'rows.jsonl'}",
        f"tasks.{name}.test={data / 'test.jsonl'}",
        "sandbox.backend=process",
    )
    flags = [flag for setting in settings for flag in ("--set", setting)]
    ran = subprocess.run([*ASTERISM, "run", f"examples/{name}.toml", *flags], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    folder = RunFolder(tmp_path / name)
    rewards = [step["reward"] for step in metrics(folder, "step")]
    assert len(rewards) == 30
    assert 0.15 <= rewards[0] <= 0.55
    assert mean(rewards[-3:]) - mean(rewards[:3]) >= MIN_RISE, rewards
    summary = json.loads(folder.summary.read_text())
    assert summary["replay_identical"] is True
    assert summary["trajectories_failed"] == 0
