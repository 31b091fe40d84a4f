"""Tests of metrics of a step's speed, compared with counts made by hand."""

import pytest

from asterism.engine.learner.batches.load_metrics import (
    MinibatchPlan,
    compute_expert_metrics,
    compute_plan_metrics,
    compute_speed_metrics,
    list_shared_prompts,
)
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.training_flops import count_forward_flops
from tests.engine.learner.batches.test_packing import sequence, sibling
from tests.engine.learner.training_examples import rl_sequences, small_run, trainable_model
from tests.engine.tiny_models import small_architecture, small_config


def test_fill_and_imbalance_of_two_ranks() -> None:
    """With attention, the 30 tokens of rank 0 cost 30 + 90, and the 10 tokens of rank 1 cost 10 + 10, in one round."""
    sequences = [sequence(31), sequence(11)]
    plan = MinibatchPlan(sequences, [[[0]], [[1]]], shares_prompts=False)
    found = compute_plan_metrics([plan], 40, attention_tokens=10.0)
    assert found == pytest.approx({"fill": 0.5, "imbalance": 1 - 70 / 120, "shared_prompt_share": 0.0})
    assert compute_plan_metrics([], 40, attention_tokens=10.0) == {}


def test_a_shared_prompt_counts_once_in_the_fill_the_costs_and_the_mfu() -> None:
    """Three sequences of 10 + 5, 10 + 20 and 10 + 10 tokens share a prompt on rank 0; rank 1 has one of them again."""
    sequences = [sibling(10, length) for length in (6, 21, 11, 11)]
    plan = MinibatchPlan(sequences, [[[0, 1, 2]], [[3]]], shares_prompts=True)
    found = compute_plan_metrics([plan], 100, attention_tokens=1e9)
    assert found == pytest.approx({"fill": 65 / 200, "imbalance": 1 - 32.5 / 45, "shared_prompt_share": 20 / 85})
    assert list_shared_prompts([plan]) == [10, 10]
    flops = count_forward_flops(small_config())
    pairs = sum(length * (length + 1) / 2 for length in (15, 30, 20, 20)) - 2 * 10 * 11 / 2
    forward = 65 * flops.per_token + 49 * flops.per_scored_token + pairs * flops.per_pair
    speed = compute_speed_metrics(sequences, flops, 2.0, 1, 1e-6, list_shared_prompts([plan]))
    assert speed == pytest.approx({"trained_tokens_per_s": 85 / 2, "mfu": 3 * forward / (2.0 * 1e6)})
    unshared = compute_plan_metrics([plan._replace(shares_prompts=False)], 100, attention_tokens=1e9)
    assert unshared == pytest.approx({"fill": 85 / 200, "imbalance": 1 - 42.5 / 65, "shared_prompt_share": 0.0})


def test_the_speed_in_tokens_and_the_share_of_peak_flops_are_measured() -> None:
    config = small_config()
    flops = count_forward_flops(config)
    layer = 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32 + 3 * 32 * 48
    assert flops == (2 * 2 * layer, 2 * 97 * 32, 4 * 2 * 4 * 16)
    sequences = [sequence(11), sequence(5, counted=False)]
    forward = 10 * flops.per_token + 10 * flops.per_scored_token + 55 * flops.per_pair
    found = compute_speed_metrics(sequences, flops, train_s=2.0, num_ranks=4, peak_tflops=1e-6)
    assert found == pytest.approx({"trained_tokens_per_s": 5.0, "mfu": 3 * forward / (2.0 * 4 * 1e6)})
    assert "mfu" not in compute_speed_metrics(sequences, flops, 2.0, 4, peak_tflops=0.0)


def test_only_the_selected_experts_of_a_token_are_counted() -> None:
    config = small_architecture("qwen3_moe")
    weights = {name: each.numel() for name, each in CausalLM(config).named_parameters() if each.dim() == 2}
    experts = sum(size for name, size in weights.items() if ".experts." in name)
    layers = sum(size for name, size in weights.items() if ".layers." in name)
    assert count_forward_flops(config).per_token == pytest.approx(2 * (layers - experts + experts * 3 / 8))


def test_attention_costs_as_much_as_the_products_at_attention_tokens() -> None:
    flops = count_forward_flops(small_config())
    length = flops.attention_tokens
    assert length * (flops.per_token + flops.per_scored_token) == pytest.approx(length**2 / 2 * flops.per_pair)


@pytest.mark.slow
def test_a_step_reports_its_plan_and_the_load_of_experts() -> None:
    trainer = Trainer(trainable_model("qwen3_moe"), small_run(), RankGroup())
    trainer.start_stage("rl")
    metrics = trainer.run_rl_step(rl_sequences(0))
    assert 0.5 < metrics["fill"] <= 1
    assert metrics["imbalance"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["expert_load_worst"] >= metrics["expert_load"] > 1
    assert 0 <= metrics["experts_idle_share"] < 1
    assert compute_expert_metrics(trainer.model, RankGroup()) == {}
