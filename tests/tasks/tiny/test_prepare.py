"""The seed determines the prepared files of the demo, and unsuitable configurations are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import SftConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.datasets import read_problems
from asterism.engine.data.sft_dialogues import iter_sft_dialogues
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.model.hf_checkpoint import load_model
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.tasks.math_python import MATH_PYTHON
from asterism.tasks.tiny.prepare import TinyDemo
from asterism.tasks.tiny.questions import Question, generate_questions

TINY = TinyDemo(num_train_questions=100, num_test_questions=20, num_sft_dialogues=100)
NOTEBOOK = DialogueConfig(tools=("jupyter_code",))
RUN = RunConfig(name="some", dialogue=NOTEBOOK)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    TINY.prepare(RUN, folder)
    return folder


def read_contents(folder: RunFolder) -> dict[str, bytes]:
    files = (path for path in folder.path.rglob("*") if path.is_file())
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_prepared_files_are_readable_as_user_files(prepared: RunFolder) -> None:
    assert len(list(read_problems(prepared.data / "train.jsonl"))) == 100
    assert len(list(read_problems(prepared.data / "test.jsonl"))) == 20
    tokenizer = load_tokenizer(prepared.checkpoints / "init")
    formats = {"": build_dialogue_format(NOTEBOOK, MATH_PYTHON)}
    assert len(list(iter_sft_dialogues(prepared.data / "sft.jsonl", tokenizer, formats))) == 100


@pytest.mark.slow
def test_the_model_has_an_embedding_for_every_token(prepared: RunFolder) -> None:
    init = prepared.checkpoints / "init"
    assert load_model(init).config.vocab_size == load_tokenizer(init).vocab_size


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_the_model_has_the_configured_architecture(architecture: Literal["qwen2", "llama"], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    tiny = replace(TINY, architecture=architecture)
    tiny.prepare(RUN, folder)
    model = load_model(folder.checkpoints / "init")
    assert model.config.model_type == architecture
    checked = tiny.check(RUN)
    assert checked.vocab_size >= model.config.vocab_size
    assert replace(checked, vocab_size=model.config.vocab_size) == model.config
    biases = [name for name, _ in model.named_parameters() if name.endswith("q_proj.bias")]
    assert len(biases) == (2 if architecture == "qwen2" else 0)


def test_the_same_seed_gives_the_same_bytes(prepared: RunFolder, tmp_path: Path) -> None:
    TINY.prepare(RUN, RunFolder(tmp_path))
    assert read_contents(RunFolder(tmp_path)) == read_contents(prepared)


def test_a_file_that_is_not_complete_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seed: int, count: int, *, held_out: bool) -> Iterator[Question]:
        yield from generate_questions(seed, count, held_out=held_out)
        raise KeyboardInterrupt

    monkeypatch.setattr("asterism.tasks.tiny.prepare.generate_questions", interrupt)
    with pytest.raises(KeyboardInterrupt):
        TINY.prepare(RUN, RunFolder(tmp_path))
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.slow
def test_another_seed_gives_different_files(prepared: RunFolder, tmp_path: Path) -> None:
    TINY.prepare(replace(RUN, seed=1), RunFolder(tmp_path))
    other, same = read_contents(RunFolder(tmp_path)), read_contents(prepared)
    changed = {name for name in same if other[name] != same[name]}
    assert changed >= {"data/train.jsonl", "data/test.jsonl", "data/sft.jsonl", "checkpoints/init/model.safetensors"}


@pytest.mark.parametrize(
    ("dialogue", "problem"),
    [
        (DialogueConfig(tools=("python_code_with_standard_io",)), "dialogue.tools: the tiny task supports only"),
        (DialogueConfig(tools=()), "dialogue.tools: the tiny task supports only"),
        (replace(NOTEBOOK, prefill="<think>"), "dialogue: the tiny task supports only the default system, "),
        (replace(NOTEBOOK, system="Hello {tools}"), "dialogue: the tiny task supports only the default system, "),
        (
            replace(NOTEBOOK, stop_tokens=("<|im_end|>", "<stop>")),
            "dialogue.stop_tokens: the tiny task has no token <stop>; use ",
        ),
        (DialogueConfig(renderer="qwen3"), "dialogue.renderer: the tiny task's tokenizer lacks the tokens of "),
    ],
)
def test_dialogues_that_the_tokenizer_cannot_express_are_refused(
    dialogue: DialogueConfig, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UnusableInput, match=problem):
        TINY.prepare(RunConfig(name="some", dialogue=dialogue, sft=SftConfig(steps=0)), RunFolder(tmp_path))
    assert not list(tmp_path.iterdir())
