"""`main(OUT, COPIES)`: each rank writes the probe of an untied model to OUT_RANK.json."""

from pathlib import Path

import msgspec

from asterism.engine.learner.distributed import join_ranks, leave_ranks
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.weight_probe import WeightProber
from tests.engine.learner.training_examples import rl_sequences, small_run, trainable_model


def main(out: str, copies: str) -> None:
    ranks = join_ranks(small_run(ranks=2, dp_replicate=int(copies)).learner)
    model, prober = trainable_model(is_tied=False), WeightProber(5, ranks)
    shard_model(model, ranks)
    prober.choose_prompts(2, rl_sequences(2))
    Path(f"{out}_{ranks.rank}.json").write_bytes(msgspec.json.encode(prober.measure(model)))
    leave_ranks(ranks)
