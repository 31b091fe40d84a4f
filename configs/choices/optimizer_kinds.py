"""The optimizers: one record for each name in learner.optimizer.name and sft.optimizer (docs/learner.md)."""

from typing import NamedTuple


class OptimizerKind(NamedTuple):
    code: str  # the function that builds it: asterism.engine.learner.optimizers.BuildOptimizers
    moments: int  # float32 numbers that it keeps for each trained parameter, at most
    trains_policy: bool = True  # whether RL may choose the optimizer; the cold start may choose each


OPTIMIZER_KINDS = {
    "adamw": OptimizerKind("asterism.engine.learner.optimizers:build_adamw", moments=2),
    # Its full-rank updates are too coarse for the small changes of RL. AdamW trains the other parameters.
    "muon": OptimizerKind("asterism.engine.learner.optimizers:build_muon", moments=2, trains_policy=False),
}
