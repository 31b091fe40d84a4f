"""Import paths name objects, and the error for a wrong path names its key."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from asterism.configs.errors import UnusableInput
from asterism.configs.import_path import find_present_path, load_object
from asterism.configs.load import load_run

KEY = "reward.functions.format"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_is_loaded_once_and_can_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "neighbour_of_rewards.py", "VALUE = 3\n")
    file = write(
        tmp_path / "rewards.py", "from neighbour_of_rewards import VALUE\nclass Some: ...\ndef give(): return VALUE\n"
    )
    function = load_object(f"{file}:give", KEY)
    assert callable(function)
    assert function() == 3
    assert load_object(f"{file}:give", KEY) is function
    assert isinstance(load_object(f"{file}:Some", KEY), type)


def test_a_module_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "module_of_the_current_folder.py", "answer = 42\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("module_of_the_current_folder:answer", KEY) == 42
    assert load_object("json:dumps", KEY) is __import__("json").dumps


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("rewards.py", "is no import path"),
        ("rewards:", "is no import path"),
        ("rewards:a.b", "is no import path"),
        ("{folder}/absent.py:give", "absent.py: no such file"),
        ("absent_package.module:give", "no module absent_package"),
        ("json.absent:give", "no module json.absent"),
        ("{folder}/good.py:giev", 'has no "giev"; did you mean "give"?'),
        ("{folder}/needs.py:give", "needs the module package_nobody_has, which is not installed"),
        ("{folder}/broken.py:give", "cannot be imported: ValueError: boom"),
        ("{folder}/torn.py:give", "cannot be imported: SyntaxError"),
        ("policies.groups.selection:keep", 'as "asterism.policies.groups.selection:keep", in Asterism'),
        ("configs.integrity.file_manifest:Manifest", "can have moved"),
        (
            "policies.groups.advantages:keep_all",
            '"policies.groups.advantages:keep_all" is named "asterism.policies.groups.group_filters:keep_all" now',
        ),
    ],
)
def test_the_error_for_a_wrong_path_names_its_key(tmp_path: Path, spec: str, problem: str) -> None:
    write(tmp_path / "good.py", "def give(): ...\n")
    write(tmp_path / "needs.py", "import package_nobody_has\n")
    write(tmp_path / "broken.py", "raise ValueError('boom')\n")
    write(tmp_path / "torn.py", "def give(:\n")
    with pytest.raises(UnusableInput) as raised:
        load_object(spec.format(folder=tmp_path), KEY)
    assert str(raised.value).startswith(f"{KEY}: ")
    assert problem in str(raised.value)


def test_modules_of_the_user_have_precedence_over_former_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tasks", "policies"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "__init__.py", "")
    (tmp_path / "tasks" / "rewards").mkdir()  # a package without __init__.py
    write(tmp_path / "tasks" / "rewards" / "unit_tests.py", "def score(): return 1\n")
    write(tmp_path / "policies.py", "def give(): return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [each for each in sys.path if not (Path(each) / "tasks").is_dir()])
    # The end of the test removes these modules.
    for name in ("tasks", "tasks.rewards", "tasks.rewards.unit_tests", "policies"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]
    assert find_present_path("tasks.rewards.unit_tests:score") == ""
    assert callable(load_object("tasks.rewards.unit_tests:score", KEY))
    assert callable(load_object("policies.py:give", KEY))
    assert find_present_path("policies.losses:LOSSES") == "asterism.policies.losses:LOSSES"  # no module of the user
    with pytest.raises(UnusableInput, match=r"no module policies\.loses"):
        load_object("policies.loses:LOSSES", KEY)


def test_only_file_paths_are_relative_to_the_configuration(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        'name = "some"\n[reward.functions]\na = "rewards.py:give"\nb = "package.rewards:give"\nc = "math"\n'
        "[reward.weights]\na = 0.5\n"
    )
    run = load_run(toml)
    assert run.reward.functions == {"a": f"{tmp_path}/rewards.py:give", "b": "package.rewards:give", "c": "math"}
