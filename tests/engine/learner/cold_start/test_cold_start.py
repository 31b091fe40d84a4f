"""Tests of the cold start on one and two ranks: tokens, validation, and losses by file."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run, write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import SftFileConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.hf.tokenizer import FastTokenizer
from asterism.engine.learner.cold_start.cold_start_steps import ColdStartSteps
from asterism.engine.learner.cold_start.dialogue_set import DialogueSet, open_dialogues
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import load_sharded_model
from asterism.engine.learner.trainer import Trainer
from tests.engine.learner.learner_runs import make_run
from tests.engine.learner.rank_processes import run_ranks

pytestmark = pytest.mark.usefixtures("sweep")
ONE = RankGroup()


def write_sums(path: Path, start: int, count: int, word: str = "makes") -> None:
    """Write dialogues that differ in length."""
    with path.open("w") as file:
        for number in range(start, start + count):
            answer = f"<reason>{'One more. ' * (number % 5)}</reason>\nThat {word} <answer>{number + 1}</answer>."
            messages = [{"role": "user", "content": f"{number} + 1?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"system": "Add.", "messages": messages}) + "\n")


def make_cold_start(path: Path, *, ranks: int = 1, **sft: Any) -> tuple[RunConfig, RunFolder]:
    """Make a run whose cold start has 40 dialogues."""
    run, folder = make_run(path, ranks=ranks)
    write_sums(folder.data / "sft.jsonl", 0, 40)
    run = replace(run, sft=replace(run.sft, **sft))
    write_resolved(run, folder.config)
    return run, folder


def open_here(run: RunConfig, folder: RunFolder) -> DialogueSet:
    return open_dialogues(run, folder, ONE, folder.checkpoints / "init")


def start_steps(run: RunConfig, folder: RunFolder) -> tuple[RunConfig, ColdStartSteps]:
    dialogues = open_here(run, folder)
    run = replace(run, sft=dialogues.sft)
    trainer = Trainer(load_sharded_model(folder.checkpoints / "init", ONE, run.learner.dtype), run, ONE)
    return run, ColdStartSteps(run, dialogues, trainer, ONE)


def run_cold_start(run: RunConfig, folder: RunFolder) -> list[dict[str, float]]:
    """Run all steps of the cold start, and return their metrics."""
    run, steps = start_steps(run, folder)
    return [steps.run_next() for _ in range(run.sft.steps)]


def read_texts(dialogues: DialogueSet, num_steps: int) -> list[list[int]]:
    return [each.load().token_ids.tolist() for step in range(num_steps) for each in dialogues.get_batch(step)]


# ---------------------------------------------------------------- token files


def test_a_second_start_reuses_the_token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = make_cold_start(tmp_path)
    first = open_here(run, folder)
    with monkeypatch.context() as patch:
        patch.delattr(FastTokenizer, "encode")
        again = open_here(run, folder)
    assert read_texts(first, 4) == read_texts(again, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sft",
    [
        {"max_tokens": 200},
        {"max_bad_rows": 1},
        {"mixture": (SftFileConfig(name="some", data="$RUN/data/sft.jsonl", prompt="run"),)},
        {"mixture": (SftFileConfig(name="some", data="$RUN/data/sft.jsonl", tool_names={"a": "jupyter_code"}),)},
        {"mixture": (SftFileConfig(name="some", data="$RUN/data/sft.jsonl", calls="python"),)},
    ],
)
def test_other_settings_or_other_data_use_another_token_file(tmp_path: Path, sft: dict[str, Any]) -> None:
    run, folder = make_cold_start(tmp_path)
    open_here(run, folder)
    open_here(replace(run, sft=replace(run.sft, **sft)), folder)
    write_sums(folder.data / "sft.jsonl", 0, 41)
    open_here(run, folder)
    assert len(list(folder.dialogue_tokens.iterdir())) == 3


def test_an_interrupted_tokenization_leaves_no_token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = make_cold_start(tmp_path)
    with (folder.data / "sft.jsonl").open("a") as file:
        file.write('{"messages": 7}\n')
    with pytest.raises(UnusableInput, match=r"sft\.jsonl: row 41"):
        open_here(replace(run, sft=replace(run.sft, max_bad_rows=0)), folder)
    assert list(folder.dialogue_tokens.iterdir()) == []
    assert len(read_texts(open_here(run, folder), 4)) == 48


def test_the_error_for_a_damaged_token_file_names_a_remedy(tmp_path: Path) -> None:
    run, folder = make_cold_start(tmp_path)
    open_here(run, folder)
    (token_file,) = folder.dialogue_tokens.iterdir()
    os.truncate(token_file / "loss_mask.bin", 8)
    with pytest.raises(UnusableInput, match=f"{token_file.name}/loss_mask.bin: damaged, .*; remove this folder"):
        open_here(run, folder)


def test_a_stored_dialogue_has_the_loss_mask_of_its_row(tmp_path: Path) -> None:
    run, folder = make_cold_start(tmp_path)
    (each,) = open_here(replace(run, sft=replace(run.sft, batch_size=1)), folder).get_batch(0)
    loaded = each.load()
    assert (each.num_tokens, each.num_loss_tokens) == (loaded.num_tokens, loaded.num_loss_tokens)
    assert each.token_id_range == loaded.token_id_range
    assert loaded.loss_mask[-1]
    assert not loaded.loss_mask[0]
    assert 0 < each.num_loss_tokens < each.num_tokens


@pytest.mark.slow
def test_tokenization_does_not_hold_all_dialogues_in_memory(tmp_path: Path) -> None:
    run, folder = make_cold_start(tmp_path, batch_size=1)
    messages = [{"role": "user", "content": "1 + 1? " * 1000}, {"role": "assistant", "content": "2"}]
    (folder.data / "sft.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 100)
    open_here(run, folder)  # this first call imports modules and fills caches
    (token_file,) = folder.dialogue_tokens.iterdir()
    num_bytes = sum(file.stat().st_size for file in token_file.iterdir())
    shutil.rmtree(folder.dialogue_tokens)
    tracemalloc.start()
    dialogues = open_here(run, folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dialogues.get_batch(0)[0].num_tokens > 5000
    assert num_bytes > 2_500_000
    assert peak < 0.5 * num_bytes


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_too_long_dialogues_are_dropped_or_truncated_and_counted(tmp_path: Path, too_long: Any) -> None:
    run, folder = make_cold_start(tmp_path, batch_size=40)
    lengths = sorted(len(each) for each in read_texts(open_here(run, folder), 1))
    limit = lengths[len(lengths) // 2]
    shutil.rmtree(folder.dialogue_tokens)
    limited = replace(run.sft, max_tokens=limit, too_long=too_long)
    found = open_here(replace(run, sft=limited), folder)
    (token_file,) = folder.dialogue_tokens.iterdir()
    report = json.loads((token_file / "report.json").read_bytes())
    num_longer = sum(length > limit for length in lengths)
    assert num_longer > 0
    expected = (40 - num_longer, num_longer, 0) if too_long == "drop" else (40, 0, num_longer)
    assert (report["dialogues"], report["too_long"], report["truncated"]) == expected
    assert max(len(each) for each in read_texts(found, 1)) == limit


def test_a_limit_below_the_length_of_every_dialogue_is_refused(tmp_path: Path) -> None:
    run, folder = make_cold_start(tmp_path, max_tokens=3, too_long="truncate")
    with pytest.raises(
        UnusableInput, match=r"sft\.jsonl: no dialogue is left: 40 dialogues are longer than sft\.max_tokens"
    ):
        open_here(run, folder)


# ---------------------------------------------------------------- steps and validation


@pytest.mark.slow
def test_the_validation_loss_falls_and_held_out_dialogues_are_never_trained_on(tmp_path: Path) -> None:
    sft = {"steps": 0, "epochs": 3.0, "validation_share": 0.2, "validation_every": 4, "batch_size": 8}
    run, folder = make_cold_start(tmp_path, **sft)
    dialogues = open_here(run, folder)
    assert dialogues.sft.steps == 12  # 3 epochs with 32 dialogues each
    trained = {tuple(each) for each in read_texts(dialogues, 12)}
    held_out = {tuple(each.load().token_ids.tolist()) for each in dialogues.validation}
    assert (len(trained), len(held_out), len(trained & held_out)) == (32, 8, 0)
    metrics = run_cold_start(run, folder)
    losses = [each["validation_loss"] for each in metrics if "validation_loss" in each]
    assert [step for step, each in enumerate(metrics, start=1) if "validation_loss" in each] == [4, 8, 12]
    assert losses[2] < losses[1] < losses[0]
    assert {each["dialogues"] for each in metrics} == {8.0}
    assert metrics[-1]["validation_tokens"] == sum(each.num_loss_tokens for each in dialogues.validation)


@pytest.mark.slow
def test_the_validation_loss_on_training_data_equals_the_training_loss(tmp_path: Path) -> None:
    """Both losses are means over the same tokens, and the learning rate is near 0."""
    path = tmp_path / "run" / "data" / "sft.jsonl"
    run, folder = make_cold_start(tmp_path, batch_size=40, steps=2, warmup_steps=1, validation=str(path))
    run = replace(run, sft=replace(run.sft, lr=1e-12, muon_lr=1e-12))
    metrics = run_cold_start(run, folder)
    assert metrics[1]["validation_loss"] == pytest.approx(metrics[0]["loss"], rel=1e-5)
    assert "validation_loss" not in metrics[0]


@pytest.mark.slow
def test_the_loss_of_a_mixture_is_the_mean_of_the_losses_of_its_files(tmp_path: Path) -> None:
    files = (
        SftFileConfig(name="sums", data="$RUN/data/sft.jsonl", weight=3.0),
        SftFileConfig(name="more", data="$RUN/data/more.jsonl"),
    )
    run, folder = make_cold_start(tmp_path, mixture=files, batch_size=8, steps=2, validation_share=0.25)
    write_sums(folder.data / "more.jsonl", 100, 20, word="yields")
    dialogues = open_here(run, folder)
    batch = dialogues.get_batch(0)
    assert [sum(each.group_id == file for each in batch) for file in (0, 1)] == [6, 2]
    metrics = run_cold_start(run, folder)
    tokens = [sum(each.num_loss_tokens for each in batch if each.group_id == file) for file in (0, 1)]
    losses = [metrics[0][f"file {name}: loss"] for name in ("sums", "more")]
    mean = sum(count * loss for count, loss in zip(tokens, losses, strict=True)) / sum(tokens)
    assert metrics[0]["loss"] == pytest.approx(mean, rel=1e-5)
    assert {"file sums: validation_loss", "file more: validation_loss"} <= metrics[-1].keys()


@pytest.mark.slow
def test_tokens_per_step_limits_the_dialogues_of_a_step(tmp_path: Path) -> None:
    run, folder = make_cold_start(tmp_path, tokens_per_step=400, steps=3)
    dialogues = open_here(run, folder)
    tokens = [sum(each.num_tokens for each in dialogues.get_batch(step)) for step in range(3)]
    assert all(200 < each <= 400 for each in tokens)
    assert {each["dialogues"] for each in run_cold_start(run, folder)} == {
        float(len(dialogues.get_batch(step))) for step in range(3)
    }


def test_a_validation_share_that_leaves_no_training_data_is_refused(tmp_path: Path) -> None:
    run, folder = make_cold_start(tmp_path, validation_share=0.99)
    write_sums(folder.data / "sft.jsonl", 0, 2)
    with pytest.raises(UnusableInput, match=r"sft\.data: no dialogue is left to train on"):
        open_here(run, folder)


# ---------------------------------------------------------------- several ranks


class ColdStart(NamedTuple):
    """The result of a cold start on one rank."""

    num_encoded: int  # number of texts that the rank encodes
    batches: list[list[list[int]]]  # token ids of the dialogues in the first steps
    metrics: list[dict[str, float]]


def cold_start(ranks: RankGroup, folder: RunFolder) -> ColdStart:
    run, encode, encoded = load_run(folder.config), FastTokenizer.encode, list[str]()

    def record(tokenizer: FastTokenizer, text: str, *, trusted: bool) -> list[int]:
        encoded.append(text)
        return encode(tokenizer, text, trusted=trusted)

    FastTokenizer.encode = record
    checkpoint = folder.expand_path(run.model.checkpoint)
    dialogues = open_dialogues(run, folder, ranks, checkpoint)
    batches = [[each.load().token_ids.tolist() for each in dialogues.get_batch(step)] for step in range(2)]
    trainer = Trainer(load_sharded_model(checkpoint, ranks, run.learner.dtype), run, ranks)
    steps = ColdStartSteps(run, dialogues, trainer, ranks)
    return ColdStart(len(encoded), batches, [steps.run_next() for _ in range(dialogues.sft.steps)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_tokenize_the_data_once_and_train_like_one_rank(tmp_path: Path) -> None:
    sft = {"steps": 3, "batch_size": 8, "validation_share": 0.2, "validation_every": 3}
    runs = [make_cold_start(tmp_path / str(count), ranks=count, **sft) for count in (1, 2)]
    (alone,), (leader, follower) = (
        run_ranks(run.learner.ranks, cold_start, folder, learner=run.learner) for run, folder in runs
    )
    assert leader.num_encoded == alone.num_encoded > 40
    assert follower.num_encoded == 0
    assert leader.batches == follower.batches == alone.batches
    for name in ("loss", "grad_norm", "tokens", "validation_loss", "validation_tokens"):
        found = [each[name] for each in leader.metrics if name in each]
        assert found == pytest.approx([each[name] for each in alone.metrics if name in each], rel=1e-4)
        assert len(found) == (1 if name.startswith("validation") else 3)
