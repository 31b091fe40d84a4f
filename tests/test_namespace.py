"""The installed wheel works for a user's project with own packages `tasks`, `configs`, `engine` and `actors`."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
OWN_PACKAGES = ("tasks", "configs", "engine", "actors")
MINE = '''
from configs import NAME

def shout(text: str) -> str:
    """Return a text in capital letters.

    Args:
        text: Any text.
    """
    return text.upper() + NAME
'''
SCORE = """
def score(completions, answer, **columns):
    return [float(text in completion[-1]["content"]) for completion, text in zip(completions, answer)]
"""
RUN = """
name = "shouts"
prepare.import = "asterism.tasks.tiny.prepare:TinyDemo"
prepare.parameters = { num_train_questions = 8, num_test_questions = 8, num_sft_dialogues = 200 }
learner.threads = 1
rl = { steps = 2, prompts = 2, rollouts = 4 }
sft = { steps = 0 }
evaluation = { questions = 2 }
sandbox = { backend = "process", spare_notebooks = 1 }
log.curves = false

[[tasks]]
name = "shouts"
import = "tasks.mine:shout"
data = "rows.jsonl"
test = "rows.jsonl"
dialogue = { response_tokens = 48, max_turns = 2 }
reward.functions = { score = "tasks.rewards.unit_tests:score" }  # asterism.tasks has this name, too
"""
_MAIN = ("__main__", "__mp_main__")  # a child of multiprocessing has the second name
# At its exit, each process of the run writes the files of its modules by the names under which it loaded them.
RECORD_MODULES = """
import atexit, json, os, sys
def record():
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    with open(os.path.join(os.environ["MODULES_FOLDER"], f"{os.getpid()}.json"), "w") as file:
        json.dump({name: os.path.realpath(path) for name, path in files.items() if path}, file)
atexit.register(record)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel, and with all packages of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packages = ("asterism/", *OWN_PACKAGES, "bus/", "policies/", "sandbox/", "analysis/")
    for name in filter(None, tracked.split("\0")):
        if name.startswith(packages) or "/" not in name:
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(folder), str(folder / "source")], check=True)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))  # a path, without editable installs
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")  # the installation of a wheel without scripts
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name in OWN_PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f'NAME = "{name}"\n')
    (folder / "tasks" / "mine.py").write_text(MINE)
    (folder / "tasks" / "rewards").mkdir()
    (folder / "tasks" / "rewards" / "unit_tests.py").write_text(SCORE)
    (folder / "run.toml").write_text(RUN)
    rows = [{"question": f"Shout {word}.", "answer": word.upper()} for word in ("hello", "world", "again")]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def run(python: Path, folder: Path, *arguments: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([python, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_installs_one_package(python: Path, tmp_path: Path):
    names = (*OWN_PACKAGES, "bus", "policies", "sandbox", "analysis", "benchmarks", "tests")
    code = f"import asterism, importlib.util; print([n for n in {names} if importlib.util.find_spec(n) is not None])"
    assert run(python, tmp_path, "-P", "-c", code) == "[]\n"


def test_task_check_accepts_a_task_of_the_users_package(python: Path, project: Path):
    asterism = ("-m", "asterism.actors.cli.main", "task", "check", "tasks.mine:shout", "--data", "rows.jsonl")
    assert "shout" in run(python, project, *asterism, "--set", "reward.functions.score=tasks.rewards.unit_tests:score")


def test_processes_of_a_run_load_each_module_under_one_name(python: Path, project: Path, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(RECORD_MODULES)
    (tmp_path / "modules").mkdir()
    variables = {"PYTHONPATH": str(tmp_path), "MODULES_FOLDER": str(tmp_path / "modules")}
    run(python, project, "-P", "-m", "asterism.actors.cli.main", "run", "run.toml", **variables)
    processes = [json.loads(path.read_text()) for path in (tmp_path / "modules").iterdir()]
    ours = [
        {name: path for name, path in modules.items() if "/asterism/" in path and name not in _MAIN}
        for modules in processes
    ]
    loaded = {name for modules in ours for name in modules}
    assert {"asterism.engine.learner.learner", "asterism.actors.generator", "asterism.actors.executor"} <= loaded
    for modules in ours:
        assert [name for name in modules if name.partition(".")[0] != "asterism"] == []
        assert len(set(modules.values())) == len(modules)


def test_torchrun_starts_the_learner_by_its_module(python: Path, tmp_path: Path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "asterism.engine.learner", "--help")
    assert "--run-folder" in run(python, tmp_path, *torchrun)
