"""Memory of a learner's rank: arithmetic by hand, and the tensors that real passes keep."""

import pytest
import torch
from msgspec.structs import replace

from asterism.analysis.planning.activation_memory import compute_activation_memory, compute_layer_activations
from asterism.analysis.planning.learner_memory import RankMemory, RankShare, compute_rank_memory
from asterism.analysis.planning.model_size import measure_model
from asterism.configs.schema.learner_config import Checkpointing
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.packed_attention import build_segments
from asterism.policies.losses.token_scores import ScoredTokens
from benchmarks.support.qwen3_models import QWEN3, read_qwen3
from tests.engine.tiny_models import small_architecture

TOKENS = 16_384
RANKS = (1, 8, 64)
# GB per rank, for each number in RANKS: the rank's share of 16 bytes per parameter; embedding and output matrix with
# their gradients in bfloat16; the inputs of all layers for 16,384 tokens in bfloat16.
BY_HAND = {"1.7B": (31, 7, 4), "4B": (69, 13, 6), "8B": (141, 26, 12), "14B": (249, 42, 17)}
# GB at the peak of a step with the FSDP units of the learner. FSDP gathers the embedding of an untied model only for
# its lookup, so 8B and 14B hold one of the two matrices. A rank also holds two gathered layers with a buffer, the
# gradients in reduction, and the layer that is recomputed.
PLANNED = {"1.7B": (33, 9, 6), "4B": (73, 17, 10), "8B": (144, 29, 15), "14B": (254, 47, 22)}


def plan_rank(model: str, ranks: int, checkpointing: Checkpointing = "full") -> RankMemory:
    config = read_qwen3(model)
    activations = compute_activation_memory(config, TOKENS, 2, checkpointing, has_packed_kernel=True, is_compiled=True)
    return compute_rank_memory(measure_model(config), RankShare(ranks, 2, has_units=True), activations)


@pytest.mark.parametrize("model", BY_HAND)
def test_memory_with_full_checkpointing_matches_figures_by_hand(model: str) -> None:
    config = read_qwen3(model)
    size = measure_model(config)
    activations = compute_activation_memory(config, TOKENS, 2, "full", has_packed_kernel=True)
    assert activations.layers == TOKENS * 2 * config.hidden_size * config.num_layers
    gigabytes = [(16 * size.total / ranks + 4 * size.ends + activations.layers) / 1e9 for ranks in RANKS]
    assert tuple(map(round, gigabytes)) == BY_HAND[model]


@pytest.mark.parametrize("model", PLANNED)
def test_the_plan_has_the_peak_of_a_step_with_fsdp_units(model: str) -> None:
    planned = [plan_rank(model, ranks) for ranks in RANKS]
    assert tuple(round(rank.total / 1e9) for rank in planned) == PLANNED[model]
    size = measure_model(read_qwen3(model))
    for rank, ranks in zip(planned, RANKS, strict=True):
        assert rank.parameters + rank.gradients + rank.moments == pytest.approx(16 * size.total / ranks)
        assert rank.held == pytest.approx(12 * size.total / ranks)


def test_the_numbers_of_parameters_match_the_published_models() -> None:
    sizes = {name: measure_model(read_qwen3(name)) for name in QWEN3}
    assert {name: size.total for name, size in sizes.items()} == {
        "0.6B": 596_049_920,
        "1.7B": 1_720_574_976,
        "4B": 4_022_468_096,
        "8B": 8_190_735_360,
        "14B": 14_768_307_200,
    }
    assert (sizes["14B"].root, sizes["14B"].output) == (0, 151_936 * 5120)
    assert sizes["4B"].root == sizes["4B"].output == 151_936 * 2560


@pytest.mark.parametrize("model", QWEN3)
def test_stronger_checkpointing_needs_less_memory(model: str) -> None:
    none, selective, full = (plan_rank(model, 64, mode).total for mode in ("none", "selective", "full"))
    assert none > 1.5 * selective > 1.5 * full


# ---------------------------------------------------------------- against real passes


def count_kept_bytes(config: DecoderConfig, dtype: torch.dtype) -> float:
    """Count the bytes per token that a forward pass keeps for its backward pass, without the parameters."""
    segments = build_segments([64, 64])
    num_tokens = sum(segments.lengths)
    model = CausalLM(config)
    initialize_weights(model, 0)
    model = model.to(dtype)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept[address] = tensor  # the reference prevents a reuse of the address
        return tensor

    positions_N = torch.arange(num_tokens)
    token_ids_T = positions_N % config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(token_ids_T[None], tokens=ScoredTokens(positions_N, token_ids_T), segments=segments)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_a_layer_keeps_the_planned_bytes_for_its_backward_pass(model_type: str, dtype: torch.dtype) -> None:
    config = small_architecture(model_type)
    three, four = (count_kept_bytes(replace(config, num_layers=layers), dtype) for layers in (3, 4))
    planned = compute_layer_activations(config, dtype.itemsize, "none", has_packed_kernel=False)
    assert four - three == pytest.approx(planned.kept, rel=0.02)
