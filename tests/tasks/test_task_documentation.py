"""Every code block of docs/tasks.md runs, as does the task on the first screen of README.md."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from asterism.actors.launch.checks.task_code_checks import describe_tasks
from asterism.bus import messages as msg
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.datasets import read_problems
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.hosting.task_services import TaskServices, build_task_services
from asterism.tasks.prepare_program import find_prepared_model, prepare_run
from asterism.tasks.tiny.tiny_tokenizer import save_tokenizer, train_tokenizer
from tests.sandbox.conftest import open_sandbox
from tests.tasks.hosting.hosts import submit

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

ROOT = Path(__file__).parents[2]


def list_blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of each fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = list_blocks(ROOT / "docs" / "tasks.md")
TOML = [text for language, text in BLOCKS if language == "toml"]
RUN = 'name = "documented"\nsandbox.backend = "process"\n'
ROWS: dict[str, dict[str, object]] = {
    "targets": {"target": 7},
    "numbers": {"question": "Guess a number from 0 to 9.", "number": 4},
    "programs": {"question": "Print 2 * n.", "tests": [["3", "6"], ["5", "10"]]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with all files of the page, and with the rows that the page's comments contain."""
    folder = tmp_path_factory.mktemp("page")
    for language, text in BLOCKS:
        if language == "python":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "json":
            (folder / "rows.jsonl").write_text(text)
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "run.toml").write_text(TOML[0])
    return folder


def load(folder: Path, toml: str) -> RunConfig:
    (folder / "other.toml").write_text(f"{RUN}model.checkpoint = '{folder}'\n{toml}")
    return load_run(folder / "other.toml")


def run_commands(folder: Path, text: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = subprocess.run(
        ["bash", "-e", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_commands_of_the_page_check_a_task_train_and_print_a_story(folder: Path) -> None:
    check, train, check_again, regrade = (text for language, text in BLOCKS if language == "console")
    assert "capital(country" in run_commands(folder, check)
    assert "capital(country" in run_commands(folder, check_again)
    output = run_commands(
        folder, train.replace("run.toml", "run.toml --set sandbox.backend=process --set log.curves=false", 1)
    )
    assert "replay of the event logs" in output
    assert "reward of capitals, sampled" in output
    assert "TrajectoryFinished" in output
    assert "graded again with tasks.capitals.reward.weights" in run_commands(folder, regrade)


def test_the_task_of_the_readme_passes_its_check(tmp_path: Path) -> None:
    (language, code), (_, commands) = list_blocks(ROOT / "README.md")
    assert language == "python"
    (tmp_path / "capitals.py").write_text(code)
    shown = run_commands(tmp_path, commands)
    assert "capital(country" in shown
    assert "Lima" in shown


def test_every_configuration_loads_with_its_tasks(folder: Path) -> None:
    kinds = [[each.kind for each in describe_tasks(load(folder, toml)).values()] for toml in TOML[1:]]
    assert kinds == [["environment"], ["dialogue"], ["tools"], ["tools", "dialogue"], [DEFAULT_TASK.kind]]


def test_the_program_of_the_page_makes_the_rows_of_the_configuration(folder: Path) -> None:
    run, made = load(folder, TOML[-1]), RunFolder(folder / "made")
    made.path.mkdir()
    assert find_prepared_model(run) is None
    prepare_run(run, made)
    assert len(list(read_problems(made.data / "rows.jsonl"))) == 5


@asynccontextmanager
async def open_services(folder: Path, toml: str) -> AsyncGenerator[TaskServices]:
    save_tokenizer(train_tokenizer(["some text"]), folder)
    run = load(folder, toml)
    async with open_sandbox("process", None) as client:
        services = build_task_services(run, RunFolder(folder), describe_tasks(run), client.sandbox)
        try:
            yield services
        finally:
            await services.close()


@pytest.fixture(scope="module")
def services(folder: Path, loop: asyncio.Runner) -> Iterator[TaskServices]:
    """Open the services of the page's environment, game and programs."""
    context = open_services(folder, "".join(TOML[1:4]))
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))


async def call(
    services: TaskServices, task: str, method: str, arguments: Mapping[str, object]
) -> msg.EnvironmentOutcome:
    """Call a method of a task. An empty method opens the instance."""
    number = 0 if method else msg.OPENING_CALL
    request = msg.EnvironmentCalled(1, number, task, method, msgspec.json.encode(arguments))
    return (await services.call(request)).outcome


async def test_the_environment_of_the_page_counts_and_gives_a_reward(folder: Path, services: TaskServices) -> None:
    assert await call(services, "counter", "", ROWS["targets"]) == msg.Observation(
        "The counter is at 0. Bring it to 7."
    )
    for amount, count in ((3, 3), (4, 7)):
        assert await call(services, "counter", "add", {"amount": amount}) == msg.Observation(
            f"The counter is at {count}."
        )
    reward, components, _ = await services.score(submit(folder, {}, "", "counter"))
    assert (reward, components) == (pytest.approx(0.98), {"reached": 1.0, "steps": -0.02})


async def test_the_game_of_the_page_answers_with_user_turns(services: TaskServices) -> None:
    await call(services, "guess", "", ROWS["numbers"])
    said = [{"role": "assistant", "content": text} for text in ("Is it 3", "", "I say 4")]
    assert [await call(services, "guess", "step", message) for message in said] == [
        msg.Observation("No. Guess again."),
        msg.Observation("No. Guess again."),
        msg.Observation("Right.", stop=True, rewards={"guess": pytest.approx(0.7)}),
    ]


async def test_the_reward_of_a_program_is_the_share_of_passed_tests(folder: Path, services: TaskServices) -> None:
    for program, share in (("print(2 * int(input()))", 1.0), ("print(6)", 0.5), ("1 /", 0.0)):
        assert (await services.score(submit(folder, ROWS["programs"], program, "programs"))).components == {
            "tests": share
        }
