"""`main(RUN_FOLDER, OUT)`: the cold start on all ranks.

Each rank writes the number of encoded texts, the dialogues of the first steps, and the metrics of all steps.
"""

import json
from pathlib import Path

from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.cold_start.cold_start_steps import ColdStartSteps
from asterism.engine.learner.cold_start.dialogue_set import open_dialogues
from asterism.engine.learner.distributed import join_ranks, leave_ranks
from asterism.engine.learner.sharding import load_sharded_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.tokenizer import FastTokenizer


def count_encoded_texts() -> list[str]:
    """Return a list that collects the texts that this process encodes from now on."""
    texts: list[str] = []
    encode = FastTokenizer.encode

    def record(tokenizer: FastTokenizer, text: str, *, trusted: bool) -> list[int]:
        texts.append(text)
        return encode(tokenizer, text, trusted=trusted)

    FastTokenizer.encode = record
    return texts


def main(folder: RunFolder, out: Path) -> None:
    run = load_run(folder.config)
    ranks, encoded = join_ranks(run.learner), count_encoded_texts()
    checkpoint = folder.expand_path(run.model.checkpoint)
    dialogues = open_dialogues(run, folder, ranks, checkpoint)
    batches = [[each.load().token_ids.tolist() for each in dialogues.get_batch(step)] for step in range(2)]
    trainer = Trainer(load_sharded_model(checkpoint, ranks, run.learner.dtype), run, ranks)
    steps = ColdStartSteps(run, dialogues, trainer, ranks)
    metrics = [steps.run_next() for _ in range(dialogues.sft.steps)]
    report = {"encoded": len(encoded), "batches": batches, "metrics": metrics}
    (out / f"{ranks.rank}.json").write_text(json.dumps(report))
    leave_ranks(ranks)
