"""The effects of whole dialogues equal those in readable text files."""

from pathlib import Path

import pytest

from tests.policies.rollout.golden import DIALOGUES, Conversation


@pytest.mark.parametrize("path", sorted(DIALOGUES.glob("*.txt")), ids=lambda path: path.stem)
def test_the_effects_match_the_golden_dialogue(path: Path) -> None:
    expected = path.read_text()
    assert "<-" in expected, (
        f"{path}: has no expected effects; run python -m tests.policies.rollout.golden and read what it wrote"
    )
    assert Conversation().play(expected) == expected


def test_golden_dialogues_exist() -> None:
    assert len(list(DIALOGUES.glob("*.txt"))) >= 15
