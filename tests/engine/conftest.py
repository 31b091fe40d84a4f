"""Fixtures: a tokenizer's folder, and a folder in the layout of transformers with a small model and its tokenizer."""

from pathlib import Path

import pytest

from tests.engine.tiny_models import save_small_model, write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("small_model"))
