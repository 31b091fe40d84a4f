"""A folder with the tokenizer that host processes use to decode trajectories."""

from pathlib import Path

import pytest

from asterism.tasks.tiny.cold_start_dialogues import generate_dialogues
from asterism.tasks.tiny.prepare import iter_tokenizer_texts
from asterism.tasks.tiny.tiny_tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_tokenizer(train_tokenizer(iter_tokenizer_texts(generate_dialogues(0, 50, 200))), folder)
    return folder
