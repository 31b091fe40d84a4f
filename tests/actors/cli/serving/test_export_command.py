"""`asterism export` writes the weights of a step, and the files that other programs need to use the model."""

import hashlib
import io
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from asterism.actors.cli.serving.export_command import ExportOptions, export_run, export_step
from asterism.actors.engines.checkpoint_argument import RunStep, find_run_step
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import GREEDY
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.data.task_inputs import build_renderer, write_task_descriptions
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.learner.checkpoints.checkpoint_folders import get_trainer_folder
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.learner_rank import LearnerRank
from asterism.tasks import MATH_PYTHON
from tests.actors.cli.invoking import check_golden_refusals, read_output, read_refusal
from tests.engine.data.cold_start_rows import write_rows
from tests.engine.export.family_folders import FAMILIES, FAMILY_KINDS, write_family_model
from tests.engine.learner.learner_runs import make_run, no_report, sweep_runs
from tests.engine.learner.learner_settings import change_learner
from tests.engine.learner.training_examples import rows, store_batch

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
NEW_TOKENS = 24
MESSAGES = Path(__file__).with_name("export_messages.txt")


def train_run(path: Path, **learner: Any) -> RunFolder:
    """Make a run with checkpoints of the steps 0, 1 and 2."""
    run, folder = make_run(path, sft_steps=0, every=1)
    options = {"keep": 9, **learner}
    run = msgspec.structs.replace(run, learner=change_learner(run.learner, **options))
    write_resolved(run, folder.config)
    rank = LearnerRank(run, folder, RankGroup())
    rank.start(None, no_report)
    for step in (1, 2):
        rank.train(step, store_batch(folder.batches, step, rows(step)))
        rank.save_if_due()
    rank.close()
    sweep_runs(path)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train_run(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train_run(tmp_path_factory.mktemp("made"), rank=2)


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.parametrize("learner", [{}, {"rank": 2}])
def test_a_step_without_a_model_is_exported_from_the_training_state(
    folder: RunFolder, with_adapters: RunFolder, tmp_path: Path, learner: dict[str, Any]
) -> None:
    """The export merges adapters. Its weights equal those of the same run with a model at every step."""
    exporting = with_adapters if learner else folder
    lazy = train_run(tmp_path / "b", **learner, export_every=5)
    chosen = find_run_step(f"{lazy.path}:1")
    assert not (chosen.checkpoint / "model.safetensors").exists()
    export_step(chosen, tmp_path / "out", ExportOptions(dtype="float32"))
    wanted = read_weights(exporting.get_checkpoint_path(1))
    exported = read_weights(tmp_path / "out")
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], wanted[name]) for name in wanted)
    before = read_weights(exporting.get_checkpoint_path(0))
    assert any(not torch.equal(exported[name], before[name]) for name in wanted)


def test_exported_weights_are_bfloat16_shards_of_the_given_size(folder: RunFolder, tmp_path: Path) -> None:
    export_step(find_run_step(str(folder.path)), tmp_path / "out", ExportOptions(max_shard_gb=2e-5))
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(shards) > 1 and sorted(set(index["weight_map"].values())) == shards
    wanted, exported = read_weights(folder.get_checkpoint_path(2)), read_weights(tmp_path / "out")
    assert all(torch.equal(exported[name], wanted[name].bfloat16()) for name in wanted)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert not (tmp_path / "out" / "trainer").exists()


def make_family_run(folder: RunFolder, family: str) -> RunStep:
    """Make a checkpoint with an exported model, but no training state."""
    write_family_model(folder.get_checkpoint_path(0), FAMILY_KINDS[family])
    write_resolved(RunConfig(name="family"), folder.config)
    write_task_descriptions(folder, {"": MATH_PYTHON})
    return RunStep(folder, 0)


@pytest.mark.parametrize("family", FAMILIES)
async def test_transformers_and_the_engine_generate_the_same_greedy_tokens(tmp_path: Path, family: str) -> None:
    """Both start from the prompt that the exported chat template renders; the run renders the same prompt. The engine's
    logprobs are those of transformers."""
    chosen, out = make_family_run(RunFolder(tmp_path / "run"), family), tmp_path / "out"
    export_step(chosen, out, ExportOptions())
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "6 * 7?"}], add_generation_prompt=True, return_dict=False
    )
    run_tokenizer = load_tokenizer(chosen.checkpoint)
    renderer = build_renderer(RunConfig(name="r").dialogue, MATH_PYTHON, run_tokenizer)
    assert prompt == renderer.render_prompt("6 * 7?")
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
    )
    theirs = whole[0, len(prompt) :].tolist()
    with torch.no_grad():
        logprobs = model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, whole[0, len(prompt) :, None])
    length = len(prompt) + NEW_TOKENS
    engine = EmbeddedEngine(out, Capacity(2 * length + 32, 16, length))
    await engine.start()
    try:
        stops = renderer.stop_token_ids
        request = GenerationRequest(0, np.array(prompt, np.int32), NEW_TOKENS, GREEDY, stop_token_ids=stops)
        generated = await engine.generate(request)
    finally:
        await engine.close()
    assert theirs == generated.token_ids.tolist()
    assert len(theirs) > 3
    assert np.abs(generated.logprobs - logprobs[:, 0].numpy()).max() < 1e-4


def test_a_checkpoint_and_an_export_have_the_same_chat_files(folder: RunFolder, tmp_path: Path) -> None:
    export_step(find_run_step(str(folder.path)), tmp_path / "out", ExportOptions())
    names = {f"{name}.json" for name in ("tokenizer", "tokenizer_config", "generation_config", "asterism")}
    names |= {"chat_template.jinja"}
    for name in names:
        assert (folder.get_checkpoint_path(2) / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    others = {"config.json", "model.safetensors", "README.md", MANIFEST_NAME}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | others


def test_an_interrupted_export_leaves_no_folder_and_the_next_one_succeeds(folder: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = os.fork()
    if child == 0:
        patch = pytest.MonkeyPatch()
        patch.setattr("asterism.configs.atomic_write.sync_tree", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        read_output("export", folder.path, out)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not out.exists()
    read_output("export", folder.path, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_files_is_replaced_only_with_overwrite(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused = read_refusal("export", folder.path, tmp_path / "out")
    assert "out: is not empty; choose another folder, or replace it with --overwrite" in refused
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    read_output("export", folder.path, tmp_path / "out", "--overwrite")
    assert not (tmp_path / "out" / "notes.txt").exists()
    assert (tmp_path / "out" / "config.json").exists()


def test_the_second_of_two_simultaneous_exports_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    def export(_: int) -> str:
        try:
            export_run(str(folder.path), tmp_path / "out", ExportOptions(), Console(file=io.StringIO()))
        except UnusableInput as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        first, second = sorted(threads.map(export, range(2)))
    assert first == ""
    assert "is not empty" in second
    assert read_weights(tmp_path / "out")


def test_unusable_arguments_are_refused_and_nothing_is_written(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "staged" / "1_short").mkdir(parents=True)
    (tmp_path / "staged" / "stages.json").write_text('{"stages": ["short", "long"]}')
    (tmp_path / "staged" / "1_short" / "config.toml").touch()
    check_golden_refusals(MESSAGES, {str(folder.path): "TRAINED", str(tmp_path): "HERE"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "staged"]
    assert folder.get_checkpoint_path(2).exists()


def test_the_model_card_has_the_figures_of_the_run(folder: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(folder.path, copy.path)
    labels = {"start_sampled": 0.25, "end_sampled": 0.75, "step_sampled": 0.5}
    lines = [{"kind": "evaluation", "label": label, "step": 1, "accuracy": each} for label, each in labels.items()]
    lines.append({"kind": "evaluation", "label": "end_greedy", "step": 2, "accuracy": 1.0})
    write_rows(copy.metrics, *lines)
    export_step(find_run_step(f"{copy.path}:1"), tmp_path / "out", ExportOptions())
    card = (tmp_path / "out" / "README.md").read_text()
    for text in ("# small, step 1", "| before RL, sampled | 25.0% |", "| after RL, sampled | 75.0% |"):
        assert text in card
    assert "| after step 1 | 50.0% |" in card
    assert "| after RL, greedy: other weights, of step 2 | 100.0% |" in card
    assert "--tool-call-parser qwen25" in card
    assert f"sha256 {hashlib.sha256(copy.config.read_bytes()).hexdigest()[:16]}" in card


def test_a_checkpoint_without_the_frozen_weights_of_its_adapters_is_refused(
    with_adapters: RunFolder, tmp_path: Path
) -> None:
    made = RunFolder(shutil.copytree(with_adapters.path, tmp_path / "a"))
    shutil.rmtree(get_trainer_folder(made.get_checkpoint_path(0)))
    with pytest.raises(UnusableInput, match=r"step_000000: missing\. Only this checkpoint has the frozen weights"):
        export_step(RunStep(made, 1), tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()
