"""Tests load runs whose model, tokenizer and file of questions are in one folder."""

from pathlib import Path

from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig

QUESTION = '{"question": "What is 1 + 1?", "answer": "2"}\n'


def load(inputs: Path, *overrides: str) -> RunConfig:
    data = f'[data]\ntrain = "{inputs}/train.jsonl"\ntest = "{inputs}/train.jsonl"\n'
    (inputs / "run.toml").write_text(
        f'name = "r"\nruns_folder = "{inputs}/runs"\n[model]\ncheckpoint = "model"\n{data}'
    )
    small = ("dialogue.prompt_tokens=32", "dialogue.response_tokens=160", "rl.prompts=4")
    return load_run(inputs / "run.toml", [*small, *overrides])
