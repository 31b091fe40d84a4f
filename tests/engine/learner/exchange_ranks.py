"""`main(RANKS_PER_NODE, FOLDER)`: four ranks on several nodes exchange samples.

Each rank writes the sequences that it loads to FOLDER/rank_R.json. Ranks on later nodes have paths without a file.
"""

import json
from pathlib import Path

from asterism.configs.schema.learner_config import LearnerConfig
from asterism.engine.learner.batches import sample_exchange
from asterism.engine.learner.batches.minibatches import build_rl_minibatches
from asterism.engine.learner.batches.packing import split_micro_batches
from asterism.engine.learner.distributed import broadcast_object, join_ranks, leave_ranks
from tests.engine.learner.training_examples import rows, store_batch


def main(ranks_per_node: str, folder: str) -> None:
    ranks = join_ranks(LearnerConfig())._replace(local_world_size=int(ranks_per_node))
    sample_exchange.PIECE_BYTES = 100  # several pieces per rank
    stored = broadcast_object(
        ranks, store_batch(Path(folder) / "batches", 1, rows(1, groups=6)) if ranks.is_leader else None
    )
    if ranks.node:
        stored = [each._replace(path=Path(folder) / "missing") for each in stored]
    minibatches = [
        (each, split_micro_batches(each, ranks.world_size, 64))
        for each in build_rl_minibatches(stored, 2, seed=0, step=1)
    ]
    exchanged = sample_exchange.exchange_samples(ranks, minibatches)
    share = [
        sequences[index]
        for (_, shares), sequences in zip(minibatches, exchanged, strict=True)
        for indices in shares[ranks.rank]
        for index in indices
    ]
    loaded = {
        "from_files": all(each.content is None for each in share),
        "sequences": [(each.trajectory_id, each.load().token_ids.tolist()) for each in share],
    }
    (Path(folder) / f"rank_{ranks.rank}.json").write_text(json.dumps(loaded))
    leave_ranks(ranks)
