"""A run refuses unusable inputs before it creates anything, and names the key of each input."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from asterism.actors.launch.checks import input_checks
from asterism.actors.launch.checks.input_checks import check_inputs, list_input_checks
from asterism.configs.errors import UnusableInput
from asterism.engine.export.hf_export import save_model
from asterism.engine.hf.model_config import load_model_config
from asterism.engine.hf.weight_files import count_parameters
from asterism.engine.model.lora_options import (
    ATTENTION_TARGETS,
    MLP_TARGETS,
    LoraOptions,
    count_adapter_parameters,
    count_trained_parameters,
)
from asterism.tasks.tiny.tiny_tokenizer import AddedTexts, save_tokenizer, train_tokenizer
from tests.actors.launch.run_inputs import load
from tests.engine.tiny_models import small_architecture, small_config, small_model
from tests.golden_messages import check_golden_messages

pytestmark = pytest.mark.slow


def change_weights(inputs: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    file = inputs / "model" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_token(inputs: Path) -> None:
    path = inputs / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|other|>"))


def change_config(inputs: Path, field: str, value: int) -> None:
    path = inputs / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))


def test_complete_inputs_are_accepted_and_nothing_is_created(inputs: Path) -> None:
    check_inputs(load(inputs))
    assert not (inputs / "runs").exists()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no train.jsonl": lambda inputs: (inputs / "train.jsonl").unlink(),
    "train.jsonl is not JSON": lambda inputs: (inputs / "train.jsonl").write_text("{\n{"),
    "train.jsonl without questions": lambda inputs: (inputs / "train.jsonl").write_text("{}"),
    "no model": lambda inputs: shutil.rmtree(inputs / "model"),
    "no config.json": lambda inputs: (inputs / "model/config.json").unlink(),
    "config.json is a list": lambda inputs: (inputs / "model/config.json").write_text("[]"),
    "no tokenizer.json": lambda inputs: (inputs / "model/tokenizer.json").unlink(),
    "index without weight_map": lambda inputs: (inputs / "model/model.safetensors.index.json").write_text("{}"),
    "weights are a folder": lambda inputs: (  # unreadable, also for root
        (inputs / "model/model.safetensors").unlink() or (inputs / "model/model.safetensors").mkdir()
    ),
    "a token of the chat format is missing": remove_token,
    "short positions": lambda inputs: change_config(inputs, "max_position_embeddings", 64),
    "no weights": lambda inputs: (inputs / "model/model.safetensors").unlink(),
    "half of the weights": lambda inputs: truncate(inputs / "model/model.safetensors"),
    "weights of another format": lambda inputs: (inputs / "model/model.safetensors").write_text("x"),
    "a tensor is missing": lambda inputs: change_weights(inputs, lambda tensors: tensors.pop("model.norm.weight")),
    "a tensor has another shape": lambda inputs: change_weights(
        inputs, lambda tensors: tensors.update({"model.norm.weight": np.ones(3)})
    ),
    "small vocabulary": lambda inputs: change_config(inputs, "vocab_size", 8),
}


def test_an_unusable_input_is_refused_with_its_key_and_the_remedy(complete: Path, tmp_path: Path) -> None:
    """Each case in the file is a key of DAMAGES or an option of the run."""

    def check(case: str) -> None:
        inputs = Path(shutil.copytree(complete, tmp_path / "inputs", dirs_exist_ok=True))
        if option := case.partition("--set ")[2]:
            (inputs / "plug_in.py").write_text("VALUE = 3\n")
            check_inputs(load(inputs, option.replace("HERE", str(inputs))))
        else:
            DAMAGES[case](inputs)
            try:
                check_inputs(load(inputs))
            finally:
                shutil.rmtree(inputs)

    check_golden_messages(
        Path(__file__).parent / "input_messages.txt", check, {f"{tmp_path}/inputs/": "", f"{tmp_path}/inputs": "HERE"}
    )


def test_stop_tokens_of_the_model_are_accepted_and_only_evaluations_need_test_questions(
    inputs: Path,
) -> None:
    check_inputs(load(inputs, 'dialogue.stop_tokens=["<|im_end|>", "<|im_start|>"]'))
    check_inputs(load(inputs, "evaluation.questions=0", "data.test=none.jsonl"))


def test_a_renderer_needs_the_tokens_of_its_family(inputs: Path) -> None:
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</think>", "<tool_call>", "</tool_call>"]
    special += ["<tool_response>", "</tool_response>"]
    tokenizer = train_tokenizer(["text"], AddedTexts(special, []))
    save_tokenizer(tokenizer, inputs / "tokenizer")
    model = small_model(config=small_config(vocab_size=tokenizer.get_vocab_size()))
    save_model(inputs / "model", model.config, model.state_dict(), inputs / "tokenizer")
    check_inputs(load(inputs, "dialogue.renderer=qwen3", "sft.steps=0"))
    cold = ("dialogue.renderer=qwen3", "sft.steps=1", f"sft.data={inputs / 'sft.jsonl'}")
    with pytest.raises(UnusableInput, match=r"^model\.checkpoint: .*: no such folder"):
        check_inputs(load(inputs, *cold, f"model.checkpoint={inputs / 'none'}"))
    question = {"role": "user", "content": "1 + 1?"}
    for answer, problem in (("It is 2.", ""), ("<tool_call>{}</tool_call> 2", "a text follows a call")):
        messages = [question, {"role": "assistant", "content": answer}]
        (inputs / "sft.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
        run = load(inputs, *cold)
        if problem:
            with pytest.raises(UnusableInput, match=rf"^sft\.data: .*row 1, field `messages\[1\]\.content`: {problem}"):
                check_inputs(run)
        else:
            assert f"sft.data: {inputs / 'sft.jsonl'}: 1 dialogues" in check_inputs(run)


def test_a_run_that_cannot_fit_into_main_memory_is_refused(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(input_checks, "read_memory_bytes", lambda: (0, 64 * gib))
    assert "warning: main memory: only 0.00 MiB are available; stop other programs" in check_inputs(load(inputs))
    with pytest.raises(UnusableInput, match=r"^main memory: .* engine\.kv_tokens.* but the machine .* has 64\.00 GiB"):
        check_inputs(load(inputs, "engine.kv_tokens=1000000000"))
    with pytest.raises(UnusableInput, match=r"the reference model \(learner\.loss\.kl_coef\)"):
        check_inputs(load(inputs, "engine.kv_tokens=1000000000", "learner.loss.kl_coef=0.01"))


def test_adapters_need_less_memory_unless_a_cold_start_trains_all_weights(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config(inputs / "model")
    total = count_parameters(inputs / "model")
    overrides = ("learner.lora.rank=2", "engine.kv_tokens=1024", "learner.loss.kl_coef=0.1")
    adapters = count_adapter_parameters(config, LoraOptions(2, 32.0, (*ATTENTION_TARGETS, *MLP_TARGETS)))
    run = load(inputs, *overrides)
    assert count_trained_parameters(config, run) == (total + adapters, adapters)
    assert count_trained_parameters(config, replace(run, sft=replace(run.sft, steps=1))) == (total, total)
    checks = list_input_checks(run)
    assert "q_proj" in checks["learner.lora.targets"]().description
    assert "reference" not in checks["main memory"]().description


def test_adapters_of_experts_are_refused_before_the_start(inputs: Path) -> None:
    fields = small_architecture("qwen3_moe", vocab_size=280).to_hf()
    (inputs / "model" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnusableInput, match=r"learner\.lora\.targets: .* belong to experts"):
        list_input_checks(load(inputs, "learner.lora.rank=2"))["learner.lora.targets"]()


def test_a_full_disk_and_full_shared_memory_are_refused(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(inputs)
    for full, place in ((Path("/dev/shm"), "/dev/shm"), (inputs, "the disk of the run")):
        monkeypatch.setattr(
            input_checks.shutil, "disk_usage", lambda path, full=full: usage._replace(free=0) if path == full else usage
        )
        with pytest.raises(UnusableInput, match=rf"^space: {place} has 0\.00 MiB free, but .* take"):
            check_inputs(load(inputs))


def test_an_import_path_of_a_function_is_accepted(inputs: Path) -> None:
    (inputs / "plug_in.py").write_text("def give(rewards): return True\n")
    check_inputs(load(inputs, f"rl.group_filter={inputs}/plug_in.py:give"))


@pytest.mark.parametrize(
    ("device", "variable", "problem"),
    [
        ("cpu", "CXX", r"no compiler \(g\+\+\) on PATH; install g\+\+, or set CXX, or set learner\.compile = false"),
        ("cuda", "CC", r"no compiler \(gcc or clang\) on PATH; install gcc, or set CC, or set"),
    ],
)
def test_compilation_is_refused_without_a_compiler_or_the_headers_of_python(
    device: str, variable: str, problem: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load(inputs, "learner.compile=true", f"learner.device={device}")
    (inputs / "Python.h").touch()
    monkeypatch.setattr(input_checks.sysconfig, "get_path", lambda _: str(inputs))
    monkeypatch.setenv("PATH", str(inputs))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UnusableInput, match=f"^learner.compile: {problem}"):
        check_inputs(run)
    monkeypatch.setenv(variable, sys.executable)
    check_inputs(run)
    (inputs / "Python.h").unlink()
    with pytest.raises(UnusableInput, match=r"^learner.compile: .*Python\.h is absent; install python3-dev"):
        check_inputs(run)


def test_a_server_refuses_a_model_with_experts_in_some_layers(inputs: Path) -> None:
    model = small_model(config=small_architecture("qwen3_moe", vocab_size=280))
    save_model(inputs / "model", model.config, model.state_dict(), inputs / "model")
    path = inputs / "model" / "config.json"
    config = json.loads(path.read_text()) | {"decoder_sparse_step": 1}
    path.write_text(json.dumps(config | {"mlp_only_layers": []}))
    list_input_checks(load(inputs, "engine.kind=sglang"))["engine.kind"]()
    path.write_text(json.dumps(config | {"mlp_only_layers": [1]}))
    assert "engine.kind" not in list_input_checks(load(inputs))
    with pytest.raises(UnusableInput, match=r"config\.json: layers without experts, such as layer 1 "):
        list_input_checks(load(inputs, "engine.kind=sglang"))["engine.kind"]()


def test_strict_determinism_refuses_a_model_with_experts(inputs: Path) -> None:
    model = small_model(config=small_architecture("qwen3_moe", vocab_size=280))
    save_model(inputs / "model", model.config, model.state_dict(), inputs / "model")
    with pytest.raises(
        UnusableInput, match=r"determinism: .*config\.json: model_type is qwen3_moe; its experts depend"
    ):
        check_inputs(load(inputs, "determinism=strict"))
    check_inputs(load(inputs, "determinism=fast"))
