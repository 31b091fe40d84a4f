"""Tests of LoRA: the layers, the learner's steps, and the published weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asterism.engine.hf.model_config import UnsupportedModel
from asterism.engine.learner.adapters.adapted_model import BasePolicy
from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.lora_linear import list_adapter_parameters, list_base_parameters
from asterism.engine.model.lora_options import LoraOptions, get_lora_options
from asterism.engine.weight_transfer.adapter_slots import AdapterLoader
from asterism.engine.weight_transfer.shared_memory import load_published
from asterism.policies.losses.token_scores import ScoredTokens
from tests.engine.learner.adapters.adapted_models import OPTIONS, SETTINGS, adapted_model, merge_adapters
from tests.engine.learner.learner_settings import make_learner
from tests.engine.learner.test_several_ranks import are_equal, differences, list_forms
from tests.engine.learner.test_weight_publisher import publish_on
from tests.engine.learner.train_ranks import RankScript, train
from tests.engine.learner.training_examples import rl_sequences, small_run
from tests.engine.tiny_models import random_ids, save_small_model, small_architecture, small_model
from tests.engine.whole_publisher import publish as publish_alone

pytestmark = pytest.mark.slow
TOKENS = torch.from_numpy(random_ids(24, seed=1))[None].long()


def compute_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.compute_logits(model(TOKENS))


# ---------------------------------------------------------------- layers


def test_untrained_adapters_and_merging_do_not_change_logits() -> None:
    base = small_model(config=small_architecture("qwen3", vocab_size=280))
    assert torch.equal(compute_logits(adapted_model(is_trained=False)), compute_logits(base))
    adapted = adapted_model()
    difference = (compute_logits(adapted) - compute_logits(base)).abs().max()
    base.load_state_dict(merge_adapters(adapted))
    assert difference > 0.1
    torch.testing.assert_close(compute_logits(base), compute_logits(adapted), rtol=1e-5, atol=1e-5)


def test_the_error_for_adapted_experts_lists_the_supported_targets() -> None:
    with pytest.raises(UnsupportedModel, match=r"gate_proj, down_proj of layer 1 belong to experts.*'o_proj'\]"):
        adapted_model("qwen3_moe")
    attention = LoraOptions(2, 4.0, ("q_proj", "v_proj"))
    names = list_adapter_parameters(adapted_model("qwen3_moe", attention))
    assert len(names) == 2 * 2 * 2


@pytest.mark.parametrize("targets", [(), ("all", "q_proj"), ("q_proj", "q_proj")])
def test_lora_targets_are_either_all_or_distinct_projections(targets: Any) -> None:
    with pytest.raises(ValueError, match="targets must be"):
        make_learner(targets=targets)


# ---------------------------------------------------------------- training


def test_a_step_updates_only_adapters_and_stores_moments_only_for_them() -> None:
    model = adapted_model()
    before = {name: each.clone() for name, each in model.named_parameters()}
    trainer = Trainer(model, small_run(**SETTINGS), RankGroup())
    trainer.start_stage("rl")
    trainer.run_rl_step(rl_sequences(1))
    adapters = list_adapter_parameters(model)
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == adapters.keys()
    (optimizer,) = trainer._optimizers  # pyright: ignore[reportPrivateUsage]
    assert {id(each) for each in optimizer.state} == {id(each) for each in adapters.values()}


def make_scripts(**learner: Any) -> list[RankScript]:
    settings = SETTINGS | {"kl_coef": 0.5} | learner
    cases = [("rl", True), ("rl", False), ("adapted", True)]
    return [RankScript(stage, is_tied=is_tied, learner=settings) for stage, is_tied in cases]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_adapters_and_gradients_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    """In one case, the number of ranks exceeds the number of rows of A."""
    alone, together = train(1, *make_scripts()), train(ranks, *make_scripts())
    for one, several in zip(alone, together, strict=True):
        assert {name.rsplit(".", 2)[1] for name in one.gradients} == {"lora_A", "lora_B"}
        assert are_equal(one, several)
        frozen = one.parameters.keys() - one.gradients.keys()
        mine, theirs = ({name: each.parameters[name] for name in frozen} for each in (one, several))
        assert differences(mine, theirs)[0] <= 1e-6  # the rounding of the cold start differs


@pytest.mark.nightly
def test_adapters_stay_in_float32_on_two_ranks_that_compute_in_bfloat16() -> None:
    for rounded in train(2, *make_scripts(dtype="bfloat16")):
        assert rounded.gradient_dtypes == rounded.optimizer_dtypes == {"torch.float32"}
        assert {dtype for _, dtype in list_forms(rounded)} == {"torch.float32"}


def test_the_policy_before_rl_disables_adapters_only_temporarily() -> None:
    model, base = adapted_model(), small_model(config=small_architecture("qwen3", vocab_size=280))
    trainer = Trainer(model, small_run(**SETTINGS, kl_coef=1.0), RankGroup())
    trainer.start_stage("rl")
    trainer.set_reference(BasePolicy(model))
    tokens = ScoredTokens(torch.arange(23), TOKENS[0, 1:])
    scores, expected = BasePolicy(model)(TOKENS, tokens=tokens), base(TOKENS, tokens=tokens)
    assert torch.equal(scores.logprobs_N, expected.logprobs_N)
    assert not torch.equal(model(TOKENS, tokens=tokens).logprobs_N, expected.logprobs_N)
    kept = Trainer(adapted_model(), small_run(**SETTINGS, kl_coef=1.0), RankGroup())
    kept.start_stage("rl")
    kept.set_reference(base.requires_grad_(False))
    assert trainer.run_rl_step(rl_sequences(1)) == kept.run_rl_step(rl_sequences(1))


# ---------------------------------------------------------------- publishing


@pytest.mark.parametrize("publish", ["merged", "adapters"])
def test_two_ranks_publish_the_merged_weights_or_the_adapters(tmp_path: Path, publish: str) -> None:
    model = adapted_model()
    folder = save_small_model(tmp_path, small_model(config=model.config))
    published = publish_on(2, 1, folder, tmp_path / "out", "float32", SETTINGS | {"publish": publish}).published
    loaded = {name: torch.zeros_like(each) for name, each in list_base_parameters(model).items()}
    if publish == "adapters":
        AdapterLoader(torch.float32, OPTIONS).load(published, loaded)
        alone = publish_alone(AdapterPublisher(tmp_path / "alone", model, torch.float32, 1), 2)
        assert alone.digest == published.digest
    else:
        load_published(published, loaded, torch.float32)
    torch.testing.assert_close(loaded, merge_adapters(model), rtol=0, atol=1e-6)
    assert get_lora_options(small_run(**SETTINGS).learner) == OPTIONS
