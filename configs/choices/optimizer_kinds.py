"""The optimizers: one record for each name in learner.optimizer.name and sft.optimizer (docs/learner.md)."""

from typing import NamedTuple


class OptimizerKind(NamedTuple):
    code: str  # import path of an asterism.engine.learner.optimizers.BuildOptimizers
    moments: int  # most float32 numbers that the optimizer keeps for a trained parameter
    trains_policy: bool = True  # whether RL accepts the optimizer; the cold start accepts all


OPTIMIZER_KINDS = {
    "adamw": OptimizerKind("asterism.engine.learner.optimizers:build_adamw", moments=2),
    # Muon's full-rank updates are too coarse for the small changes of RL. AdamW trains the other parameters.
    "muon": OptimizerKind("asterism.engine.learner.optimizers:build_muon", moments=2, trains_policy=False),
}
