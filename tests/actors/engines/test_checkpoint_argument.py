"""The checkpoint argument names a model on a command line."""

from pathlib import Path

import pytest

from asterism.actors.engines.checkpoint_argument import (
    CheckpointArgument,
    find_run_folder,
    find_run_step,
    list_exported_steps,
    parse_checkpoint_argument,
)
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Make runs/demo in the current folder: models of steps 0, 2 and 10; step 20 has only the learner's state."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/demo"))
    for step in (0, 2, 10, 20):
        checkpoint = folder.get_checkpoint_path(step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
        if step < 20:
            (checkpoint / "model.safetensors").touch()
    folder.config.write_text('name = "demo"\n')
    staged = Path("runs/staged")
    (staged / "1_short").mkdir(parents=True)
    (staged / "1_short/config.toml").touch()
    (staged / "stages.json").write_text('{"stages": ["short", "long"]}')
    return folder


@pytest.mark.parametrize("text", ["demo", "runs/demo", "demo:10", "runs/demo:step_000010", "demo:last"])
def test_a_run_names_its_newest_model_and_a_step_names_its_own_model(text: str, run: RunFolder) -> None:
    expected = CheckpointArgument(text, run.get_checkpoint_path(10), run, 10)
    assert parse_checkpoint_argument(text) == expected
    assert list_exported_steps(run) == [0, 2, 10]
    assert find_run_step(text).step == (10 if "10" in text else 20)  # it needs no exported model


def test_the_best_step_is_read_from_the_evaluations(run: RunFolder) -> None:
    with pytest.raises(
        UnusableInput, match=r"demo:best: the run has no best.json .*; runs/demo has the steps 0, 2, 10"
    ):
        parse_checkpoint_argument("demo:best")
    (run.checkpoints / "best.json").write_text('{"step": 2, "label": "x", "reward": 1, "evaluated_step": 10}')
    assert parse_checkpoint_argument("demo:best").step == find_run_step("demo:best").step == 2


def test_a_checkpoint_folder_belongs_to_its_run(run: RunFolder) -> None:
    found = parse_checkpoint_argument(str(run.get_checkpoint_path(2)))
    assert (found.folder, found.step) == (run.get_checkpoint_path(2), 2)
    assert found.run is not None
    assert found.run.path == run.path.resolve()


def test_a_checkpoint_folder_without_weights_is_also_a_step(run: RunFolder) -> None:
    text = str(run.get_checkpoint_path(20))
    found, folder = find_run_step(text), find_run_folder(text)
    assert (found.run.path, found.step) == (run.path.resolve(), 20)
    assert folder is not None
    assert folder.path == run.path.resolve()
    with pytest.raises(UnusableInput, match="no checkpoint of step 30"):
        find_run_step(str(run.get_checkpoint_path(30)))


def test_a_transformers_folder_and_a_url_belong_to_no_run(run: RunFolder, tmp_path: Path) -> None:
    model = tmp_path / "model:7b"
    run.get_checkpoint_path(2).rename(model)
    assert parse_checkpoint_argument(str(model)) == CheckpointArgument(str(model), model)
    (model / "model.safetensors").unlink()
    with pytest.raises(UnusableInput, match=r"model:7b/model\.safetensors: no such file; expected the whole folder"):
        parse_checkpoint_argument(str(model))
    url = "https://localhost:3/v1"
    assert parse_checkpoint_argument(url) == CheckpointArgument(url, None, url=url)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other", "other: no such folder; expected a model's folder, RUN, RUN:STEP or the URL of a server"),
        ("other:3", "other:3: no such folder"),
        ("demo:3", "demo:3: no exported model of step 3; runs/demo has the steps 0, 2, 10"),
        ("demo:20", "no exported model of step 20"),
        ("demo:newest", 'expected a number, "last" or "best" after the colon; runs/demo has the steps 0, 2, 10'),
        ("runs/demo/checkpoints/step_000020", r"has no exported model .*; .*runs/demo has the steps 0, 2, 10"),
        ("runs", r"runs: is neither a model's folder \(config.json\) nor a run's \(config.toml\)"),
        ("staged", "runs/staged: has several stages; name one of them: runs/staged/1_short$"),
        ("ftp://host", "ftp://host: expected the URL of a server"),
    ],
)
def test_an_unusable_argument_is_refused_with_the_cause(text: str, message: str, run: RunFolder) -> None:
    with pytest.raises(UnusableInput, match=message):
        parse_checkpoint_argument(text)
