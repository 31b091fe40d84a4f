"""A model card shows the lineage over stages and runs, but no path of the training machine."""

from pathlib import Path

import msgspec
import pytest

from asterism.actors.cli.serving.model_card import write_model_card
from asterism.actors.engines.checkpoint_argument import RunStep
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import RlConfig, RocConfig, SftConfig
from asterism.configs.schema.run_config import DataConfig, ModelConfig, RunConfig
from asterism.engine.export.chat_files import ServingFacts
from tests.engine.learner.learner_settings import make_learner

FACTS = ServingFacts(tool_call_parser="", reasoning_parser="", context_tokens=4096, tools=[])


def make_run(path: Path, name: str, **options: object) -> RunConfig:
    data = path.parent / "questions" / "train.jsonl"
    data.parent.mkdir(exist_ok=True)
    data.write_text('{"question": "1+1?", "answer": 2}\n')
    run = RunConfig(name=name, rl=RlConfig(steps=9), data=DataConfig(train=str(data)))
    run = msgspec.structs.replace(run, **options)
    path.mkdir(parents=True)
    write_resolved(run, RunFolder(path).config)
    return run


def write_card(run: RunConfig, path: Path, step: int) -> str:
    out = path.parent / f"out{step}"
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "qwen3"}')
    write_model_card(out, run, RunStep(RunFolder(path), step), FACTS, "bfloat16")
    return (out / "README.md").read_text()


@pytest.fixture
def first(tmp_path: Path) -> RunConfig:
    model = ModelConfig(checkpoint=str(tmp_path / "models" / "qwen3-4b"))
    sft = SftConfig(steps=600, data=str(tmp_path / "sft.jsonl"))
    return make_run(tmp_path / "1_8k", "math/1_8k", model=model, sft=sft, roc=RocConfig(enabled=True))


def make_second(tmp_path: Path) -> RunConfig:
    checkpoint = str(RunFolder(tmp_path / "1_8k").get_checkpoint_path(9))
    options = {"model": ModelConfig(checkpoint=checkpoint), "learner": make_learner(resume_from=checkpoint)}
    return make_run(tmp_path / "2_12k", "math/2_12k", sft=SftConfig(steps=0), roc=RocConfig(enabled=False), **options)


def test_the_card_of_a_stage_lists_the_training_of_earlier_stages(first: RunConfig, tmp_path: Path) -> None:
    card = write_card(make_second(tmp_path), tmp_path / "2_12k", 4)
    lineage = [line for line in card.splitlines() if line.startswith("- ")]
    assert lineage == [
        "- initial model `models/qwen3-4b`",
        "- cold start: 600 steps",
        "- 9 of 9 steps of GRPO with Resample-on-Correct in math/1_8k",
        "- 4 of 9 steps of GRPO in math/2_12k",
    ]
    assert "0 steps of cold start" not in card


def test_no_card_contains_a_path_of_the_machine(first: RunConfig, tmp_path: Path) -> None:
    cards = [write_card(first, tmp_path / "1_8k", 3), write_card(make_second(tmp_path), tmp_path / "2_12k", 4)]
    for card in cards:
        assert str(tmp_path) not in card
        assert str(tmp_path.parent) not in card
        assert "`questions/train.jsonl` (sha256 " in card


def test_a_deleted_stage_is_named(first: RunConfig, tmp_path: Path) -> None:
    second = make_second(tmp_path)
    RunFolder(tmp_path / "1_8k").config.unlink()
    card = write_card(second, tmp_path / "2_12k", 4)
    assert "- step 9 of the run 1_8k, of which no more is known" in card


def test_files_of_the_run_are_relative_to_its_folder(tmp_path: Path) -> None:
    model = ModelConfig(checkpoint="$RUN/checkpoints/init")
    run = make_run(tmp_path / "demo", "demo", model=model, sft=SftConfig(steps=0))
    card = write_card(run, tmp_path / "demo", 1)
    assert "- initial model `checkpoints/init` of the run" in card
    assert "cold start:" not in card
