"""Whole conversations with one trajectory, held against text files that a person can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.policies.golden import DIALOGUES, Conversation


@pytest.mark.parametrize("path", sorted(DIALOGUES.glob("*.txt")), ids=lambda path: path.stem)
def test_the_trajectory_answers_as_the_golden_dialogue_says(path: Path) -> None:
    expected = path.read_text()
    assert "<-" in expected, (
        f"{path}: has no expected effects; run python -m tests.policies.golden and read what it wrote"
    )
    assert Conversation().play(expected) == expected


def test_there_are_golden_dialogues() -> None:
    assert len(list(DIALOGUES.glob("*.txt"))) >= 15
