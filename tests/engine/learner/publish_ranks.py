"""`main(CHECKPOINT, OUT, DTYPE, RANKS_PER_NODE, LEARNER)`: publishes a model twice.

Ranks on later nodes cannot write to OUT/slots. Each rank writes the peak of its anonymous memory to OUT/RANK.json; the
leading rank writes the second message to OUT/published.json.
"""

import json
from pathlib import Path

import msgspec
import torch

from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher
from asterism.engine.learner.distributed import join_ranks, leave_ranks
from asterism.engine.learner.sharding import load_sharded_model
from asterism.engine.learner.weight_publisher import AdapterMerger, WeightPublisher
from asterism.engine.model.lora_linear import list_base_parameters
from asterism.engine.model.lora_options import get_lora_options
from tests.engine.learner.adapters.adapted_models import fill_adapters
from tests.engine.learner.rank_probes import measuring_memory
from tests.engine.learner.training_examples import small_run


def main(checkpoint: str, out: str, dtype: str, ranks_per_node: str, settings: str) -> None:
    learner = small_run(**msgspec.json.decode(settings), ranks=4).learner
    ranks = join_ranks(learner)._replace(local_world_size=int(ranks_per_node))
    model = load_sharded_model(Path(checkpoint), ranks, learner.dtype, get_lora_options(learner))
    fill_adapters(model)
    slots = Path(out) / "slots" if ranks.node == 0 else Path(out) / "another_node"
    options = getattr(torch, dtype), 1, ranks
    if learner.lora.publish == "adapters":
        publisher = AdapterPublisher(slots, model, *options)
    else:
        publisher = WeightPublisher(slots, list_base_parameters(model), *options, AdapterMerger(model))
    with measuring_memory() as peak:
        publisher.publish(1)
        published = publisher.publish(2)
    if published is not None:
        (Path(out) / "published.json").write_bytes(msgspec.json.encode(published))
    (Path(out) / f"{ranks.rank}.json").write_text(json.dumps({"publishing_bytes": peak.growth}))
    leave_ranks(ranks)
