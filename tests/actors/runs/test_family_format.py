"""A whole run uses the chat format of a model family: cold start, rollouts, evaluation and export.

Initial models have random weights, and tokenizers with the properties of the family's tokenizer.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from asterism.configs.run_folder import RunFolder
from asterism.engine.data.token_files import map_token_file
from tests.actors.runs.running import asterism_output, metrics, read_conserved_summary
from tests.engine.export.exported_chats import render
from tests.engine.export.family_folders import FAMILY_KINDS, write_family_model

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

RENDERERS = {"qwen3": "qwen3", "llama3": "llama-3"}
CONFIG = """
name = "family"
seed = 0
runs_folder = "{folder}/runs"
model.checkpoint = "{folder}/model"
data.train = "{folder}/questions.jsonl"
data.test = "{folder}/questions.jsonl"

[dialogue]
renderer = "{renderer}"
tools = ["jupyter_code"]
response_tokens = 256
max_turns = 3

[sft]
data = "{folder}/dialogues.jsonl"
steps = 200
batch_size = 16
optimizer = "muon"
muon_lr = 0.03
lr = 3e-3

[rl]
steps = 2
prompts = 8
rollouts = 4

[learner]
threads = 1

[engine]
kv_tokens = 40_000

[sandbox]
backend = "process"
spare_notebooks = 8

[evaluation]
questions = 8
"""


def make_dialogue(draw: random.Random) -> tuple[str, str, list[dict[str, Any]]]:
    """Return question, answer and messages."""
    first, second = draw.randrange(10), draw.randrange(10)
    question, answer = f"{first} + {second}?", str(first + second)
    call = {"function": {"name": "jupyter_code", "arguments": {"code": f"{first} + {second}"}}}
    return (
        question,
        answer,
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"Tool call success\nstdout:\n{answer}"},
            {"role": "assistant", "content": f"<answer>\\boxed{{{answer}}}</answer>"},
        ],
    )


@pytest.mark.parametrize("family", RENDERERS)
def test_a_cold_start_teaches_the_calls_and_answers_of_the_rollouts(tmp_path: Path, family: str) -> None:
    write_family_model(tmp_path / "model", FAMILY_KINDS[family])
    draw = random.Random(0)
    dialogues = [make_dialogue(draw) for _ in range(300)]
    rows = [{"messages": messages} for *_, messages in dialogues]
    questions = [{"question": question, "answer": answer} for question, answer, _ in dialogues[:60]]
    for name, content in (("dialogues", rows), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    config = tmp_path / "family.toml"
    config.write_text(CONFIG.format(folder=tmp_path, renderer=RENDERERS[family]))
    asterism_output("run", config)
    folder = RunFolder(tmp_path / "runs" / "family")
    read_conserved_summary(folder)
    first_step = metrics(folder, "step")[0]
    assert first_step["ended: answered"] > 0.7 * first_step["trajectories"]
    assert first_step["calls_per_rollout"] > 0.7 and first_step["tool_errors"] < 0.3
    asterism_output("export", folder.path, tmp_path / "exported")
    assert_learned_tokens(folder, tmp_path / "exported", rows)


def assert_learned_tokens(folder: RunFolder, exported: Path, rows: list[dict[str, Any]]) -> None:
    """Check that the exported template renders the cold start's dialogues, apart from a last line break."""
    (tokens,) = (map_token_file(each) for each in folder.dialogue_tokens.iterdir())
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    for place, row in enumerate(rows[:50]):
        token_ids, _ = tokens.read(place)
        assert render(tokenizer, row["messages"])[: len(token_ids)] == token_ids.tolist()
