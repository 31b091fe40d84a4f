"""Tests of the model for training. test_architectures.py compares it with transformers."""

import pytest
import torch

from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.policies.losses.token_scores import ScoredTokens
from tests.engine.closeness import assert_close
from tests.engine.tiny_models import VOCABULARY, small_config, small_model


def test_padding_on_the_right_does_not_change_earlier_positions() -> None:
    model = small_model()
    token_ids = torch.randint(0, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    padded = torch.cat((token_ids, torch.zeros(1, 5, dtype=torch.int64)), dim=1)
    assert_close(model(padded)[:, :12], model(token_ids), atol=1e-5, rtol=0)


def test_explicit_positions_are_used() -> None:
    model = small_model()
    token_ids = torch.arange(12)[None]
    assert torch.equal(model(token_ids, torch.arange(12)[None]), model(token_ids))
    assert not torch.allclose(model(token_ids, 2 * torch.arange(12)[None]), model(token_ids))


def test_equal_seeds_give_equal_weights() -> None:
    first, again, other = (CausalLM(small_config()) for _ in range(3))
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        initialize_weights(model, seed)
    weights = [model.get_parameter("model.layers.1.mlp.up_proj.weight") for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert abs(weights[0].std() - 0.02) < 0.002


@pytest.mark.parametrize("tied", [True, False])
def test_the_scores_of_a_forward_pass_agree_with_its_logits(tied: bool) -> None:
    model = small_model(config=small_config(tie_word_embeddings=tied))
    generator = torch.Generator().manual_seed(0)
    token_ids_BT = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    positions_N, targets_N = torch.tensor([0, 8, 11]), torch.tensor([5, 96, 0])
    scores = model(token_ids_BT, tokens=ScoredTokens(positions_N, targets_N, temperature=0.7))
    logits_NV = model.compute_logits(model(token_ids_BT)).flatten(0, 1)[positions_N] / 0.7
    log_p_NV = logits_NV.log_softmax(-1)
    assert_close(scores.logprobs_N, log_p_NV.gather(1, targets_N[:, None])[:, 0])
    assert_close(scores.entropies_N, -(log_p_NV.exp() * log_p_NV).sum(-1))
