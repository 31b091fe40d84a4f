"""`asterism log story` lists the turns that can be forked; `log fork` refuses other turns before it replays a log."""

from pathlib import Path

import pytest
from rich.console import Console

from asterism.actors.cli.log import show_command
from asterism.actors.cli.log.fork_command import ForkOptions, fork_trajectory
from asterism.actors.cli.log.fork_points import (
    ForkableTurn,
    format_forkable_turns,
    list_forkable_turns,
    read_turn_versions,
)
from asterism.actors.cli.log.show_command import print_story
from asterism.bus.messages import CodeOk, Output
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from tests.consoles import capture
from tests.fakes import CALL, generated, start_group, text_context
from tests.recorded import Recording


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Make a log in which trajectory 7 has three turns: two of policy version 2 and one of version 3."""
    folder = RunFolder(tmp_path / "run")
    recording = Recording(folder)
    recording.begin()
    recording.tell("rollout-0", start_group())
    for number, version in enumerate((2, 2, 3)):
        (turn,) = recording.turns
        recording.turns.clear()
        text = CALL if number < 2 else "</reason><answer>\\boxed{2}</answer>"
        recording.tell("rollout-0", generated(7, number, text, version=version, lease=turn.lease))
        if number < 2:
            recording.answer(recording.calls.pop(0), CodeOk(Output("4")))
    recording.close()
    return folder


def export_model(folder: RunFolder, version: int) -> None:
    checkpoint = folder.get_checkpoint_path(version)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "model.safetensors").touch()


def make_options(turn: int, checkpoint: Path | None = None) -> ForkOptions:
    return ForkOptions(7, turn, None, checkpoint, None, 1, [], None)


def test_each_turn_is_listed_with_its_version_and_any_problem_of_its_checkpoint(folder: RunFolder) -> None:
    export_model(folder, 2)
    assert read_turn_versions(folder, 7) == {0: 2, 1: 2, 2: 3}
    kept, gone = "", "not kept (learner.checkpoints.keep)"
    expected = [ForkableTurn(0, 2, kept), ForkableTurn(1, 2, kept), ForkableTurn(2, 3, gone)]
    assert list_forkable_turns(folder, 7) == expected
    assert format_forkable_turns(expected) == [
        "log fork: turns 0 to 1, policy version 2",
        "log fork: turn 2, version 3 is not kept (learner.checkpoints.keep): needs --checkpoint FOLDER",
    ]


def test_a_checkpoint_without_an_exported_model_is_reported(folder: RunFolder) -> None:
    folder.get_checkpoint_path(2).mkdir(parents=True)
    assert list_forkable_turns(folder, 7)[0].problem == "without an exported model (learner.checkpoints.export_every)"


def test_the_story_ends_with_the_forkable_turns(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show_command, "load_text_context", lambda _: text_context())  # pyright: ignore
    shown = capture(lambda console: print_story(folder, 7, console), width=80)
    assert shown.splitlines()[-2].startswith("log fork: turns 0 to 1, version 2 is not kept")


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (0, "has not kept policy version 2, which generated turn 0 of trajectory 7: name a checkpoint"),
        (2, "has not kept policy version 3, which generated turn 2"),
        (9, "--turn 9: .*trajectory 7 has turns 0 to 2"),
        (-1, "--turn -1: .*trajectory 7 has turns 0 to 2"),
    ],
)
def test_a_fork_is_refused_after_reading_only_the_log(folder: RunFolder, turn: int, message: str) -> None:
    """The folder has neither configuration nor tokenizer: the replay would fail without them."""
    with pytest.raises(UnusableInput, match=message):
        fork_trajectory(folder, make_options(turn), Console(quiet=True))


def test_a_turn_with_a_given_or_a_kept_checkpoint_passes_the_first_check(folder: RunFolder, tmp_path: Path) -> None:
    export_model(folder, 3)
    for options in (make_options(2), make_options(0, tmp_path)):
        with pytest.raises((OSError, UnusableInput), match=r"config\.toml"):
            fork_trajectory(folder, options, Console(quiet=True))


def test_the_latest_trajectory_with_a_number_is_used(tmp_path: Path) -> None:
    """A resumed run reuses the numbers of trajectories."""
    folder = RunFolder(tmp_path / "run")
    recording = Recording(folder)
    recording.begin()
    start = start_group()
    recording.tell("rollout-0", start)
    (turn,) = recording.turns
    recording.tell("rollout-0", generated(7, 0, "</reason><answer>\\boxed{2}</answer>", lease=turn.lease))
    assert read_turn_versions(folder, 8) == {}
    recording.close()
    assert read_turn_versions(folder, 7).keys() == {0}
