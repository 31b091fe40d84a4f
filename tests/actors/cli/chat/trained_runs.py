"""Make a run folder with a tiny model, trained on a few dialogues until it repeats their answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from asterism.configs.file_manifest import list_files, write_manifest
from asterism.configs.load import load_run, write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.engine.data.sft_dialogues import iter_sft_dialogues
from asterism.engine.data.task_inputs import build_task_formats, write_task_descriptions
from asterism.engine.export.hf_export import save_model
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.policies.dialogue.json_calls import format_tool_call
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.prepare_program import load_program
from asterism.tasks.tiny.prepare import TinyDemo
from tests.engine.data.cold_start_rows import write_rows

ROOT = Path(__file__).parents[4]
STEPS, LEARNING_RATE = 80, 4e-3
SETTINGS = (
    "prepare.parameters={num_train_questions = 8, num_test_questions = 8, num_sft_dialogues = 200}",
    *("dialogue.prompt_tokens=64", "dialogue.response_tokens=2000", "sandbox.backend=process"),
    *("sandbox.time_limit_s=600", "sampling.temperature=0.0", "rl.steps=0", "engine.page_tokens=16"),
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<reason>{text}"}


def call(code: str) -> dict[str, Any]:
    return assistant("Let me compute this.</reason>\n" + format_tool_call("jupyter_code", {"code": code}))


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def answer(text: str) -> dict[str, Any]:
    return assistant(f"I have the result.</reason>\n<answer>\\boxed{{{text}}}</answer>")


ENDLESS = assistant("1" + " 1" * 80)
INTERRUPTED = result("Tool call failure\nKeyboardInterrupt: interrupted by the user")
DIALOGUES = (
    [user("What is 6 * 7?"), call("print(6 * 7)"), result("Tool call success\nstdout:\n42"), answer("42")],
    [
        *(user("What is 6 * 7?"), call("print(6 * 7)"), result("Tool call success\nstdout:\n42"), answer("42")),
        *(user("And 1?"), answer("1")),
    ],
    [user("Count."), ENDLESS],
    [user("Wait."), call("while True: pass"), INTERRUPTED, answer("0")],
    [user("What is 6 * 7?"), call("print(6 * 7)"), INTERRUPTED, answer("0")],
)


def make_trained_run(folder: RunFolder, dialogues: Sequence[Sequence[dict[str, Any]]] = DIALOGUES) -> RunFolder:
    """Make checkpoints: step 0 with random weights, and step 3 after training."""
    settings = [f"name={folder.path.name}", f'runs_folder="{folder.path.parent}"', *SETTINGS]
    run = load_run(ROOT / "configs" / "tiny.toml", settings)
    descriptions = {"": DEFAULT_TASK}
    folder.path.mkdir(parents=True)
    write_resolved(run, folder.config)
    write_task_descriptions(folder, descriptions)
    demo = load_program(run)
    assert isinstance(demo, TinyDemo)
    demo.prepare(run, folder)
    (folder.checkpoints / "init").rename(folder.get_checkpoint_path(0))
    rows = write_rows(folder.data / "sft.jsonl", *({"messages": messages} for messages in dialogues))
    write_manifest(folder.data, list_files(folder.data))
    tokenizer = load_tokenizer(folder.data / "tokenizer")
    config = demo.build_model_config(tokenizer.vocab_size)
    model = CausalLM(config)
    initialize_weights(model, 0)
    dialogues_read = iter_sft_dialogues(rows, tokenizer, build_task_formats(run, descriptions))
    learn(model, [dialogue.token_ids for dialogue in dialogues_read])
    save_model(folder.get_checkpoint_path(3), config, model.state_dict(), folder.data / "tokenizer")
    return folder


def learn(model: CausalLM, sequences: Sequence[list[int]]) -> None:
    """Train on all tokens except the end of the longest sequence, so that the answer in this sequence never ends."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*sequence, *[-1] * (longest - len(sequence))] for sequence in sequences])
    ids[ids.ne(-1).sum(1).argmax(), -2:] = -1
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        logits = model.compute_logits(model(ids.clamp(min=0)))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
