"""Compares the plan with the measured peak memory of real learner steps, on one and two ranks.

The processes return freed blocks to the system at once (MALLOC_MMAP_THRESHOLD_), so that anonymous memory is the memory of
live tensors, on any machine.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from asterism.analysis.planning.activation_memory import compute_activation_memory
from asterism.analysis.planning.learner_memory import RankMemory, RankShare, compute_rank_memory
from asterism.analysis.planning.model_size import measure_model
from asterism.engine.hf.model_config import DecoderConfig
from tests.engine.learner.memory_ranks import MemoryCase, measure
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import small_run

MICRO_BATCHES = 2  # micro batches per rank and update


def make_case(model: dict[str, Any], sequence_tokens: int, sequences_per_rank: int, **learner: Any) -> MemoryCase:
    tokens = sequence_tokens * sequences_per_rank // MICRO_BATCHES
    settings = {"micro_batch_tokens": tokens, "minibatches": 1, **learner}
    return MemoryCase(model=model, learner=settings, sequence_tokens=sequence_tokens, num_sequences=sequences_per_rank)


def make_model(width: int, inner: int, layers: int, heads: int, vocab_size: int, **fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab_size}
    heads_fields = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64}
    return {"model_type": "qwen3", "tie_word_embeddings": True, **sizes, **heads_fields, **fields}


# The peak is at the logits of a tied model, at one of two chunks of logits, or at the update. "selective" and "full"
# need less memory for activations, and "reduced once" needs more for gradients.
CASES = {
    "tied": make_case(make_model(512, 1536, 8, 8, 8192), 256, 4),
    "chunked": make_case(
        make_model(256, 768, 4, 4, 32_768, model_type="llama", tie_word_embeddings=False), 1100, MICRO_BATCHES
    ),
    "parameters": make_case(make_model(768, 3072, 5, 12, 4096), 64, 4),
    "bfloat16": make_case(make_model(512, 1536, 8, 8, 8192), 256, 4, dtype="bfloat16"),
    "selective": make_case(make_model(512, 1536, 8, 8, 4096), 1024, 4, activation_checkpointing="selective"),
    "full": make_case(make_model(512, 1536, 8, 8, 4096), 1024, 4, activation_checkpointing="full"),
    "reduced once": make_case(make_model(768, 3072, 5, 12, 4096), 64, 4, reduce_gradients="once"),
}


def plan(case: MemoryCase, ranks: int) -> RankMemory:
    config = DecoderConfig.from_hf(case.model)
    is_float32 = case.learner.get("dtype", "float32") == "float32"
    value_bytes = 4 if is_float32 else 2
    tokens = case.learner["micro_batch_tokens"]
    activations = compute_activation_memory(
        config, tokens, value_bytes, case.learner.get("activation_checkpointing", "none"), has_packed_kernel=False
    )
    share = RankShare(
        ranks,
        value_bytes,
        has_units=ranks > 1,
        keeps_casts=case.learner.get("activation_checkpointing", "none") == "none",
        reduces_once=case.learner.get("reduce_gradients") == "once",
    )
    return compute_rank_memory(measure_model(config), share, activations)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("chunked", 2),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                *(("tied", 1), ("tied", 2), ("chunked", 1), ("parameters", 1), ("parameters", 2)),
                *(("bfloat16", 1), ("bfloat16", 2), ("selective", 1), ("full", 2), ("reduced once", 2)),
            ]
        ),
    ],
)
def test_the_peak_of_real_steps_is_within_15_percent_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
    case = CASES[name]
    case = msgspec.structs.replace(case, num_sequences=ranks * case.num_sequences)
    planned = plan(case, ranks)
    for measured in run_ranks(ranks, measure, case, learner=small_run(**case.learner).learner):
        assert measured.model_bytes == pytest.approx(planned.parameters, rel=0.1)
        assert planned.total == pytest.approx(measured.peak_bytes, rel=0.15), planned
