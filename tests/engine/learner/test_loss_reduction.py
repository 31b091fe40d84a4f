import pytest
import torch
from torch import Tensor

from asterism.engine.learner import loss_reduction
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.loss_reduction import reduce_outputs
from asterism.policies.losses.policy_loss import LossOutput


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collect the tensors that a reduction sends to other ranks."""
    sent: list[Tensor] = []

    def all_reduce(_ranks: RankGroup, values: Tensor, _operation: object) -> Tensor:
        sent.append(values)
        return values

    monkeypatch.setattr(loss_reduction, "all_reduce", all_reduce)
    return sent


def test_the_cold_start_reduces_its_loss_but_no_empty_maxima(reduced: list[Tensor]) -> None:
    sums = reduce_outputs([LossOutput(torch.tensor(2.0)), LossOutput(torch.tensor(3.0))], RankGroup())
    assert (sums.loss, sums.maxima) == (5.0, {})
    assert [each.tolist() for each in reduced] == [[5.0]]


def test_reduced_sums_and_maxima_keep_their_names(reduced: list[Tensor]) -> None:
    outputs = [
        LossOutput(
            torch.tensor(1.0),
            token_means={"a": torch.tensor(n)},
            sequence_means={"b": torch.tensor(10 * n)},
            maxima={"c": torch.tensor(-n)},
        )
        for n in (1, 2)
    ]
    sums = reduce_outputs(outputs, RankGroup())
    assert (sums.token_sums, sums.sequence_sums, sums.maxima) == ({"a": 3.0}, {"b": 30.0}, {"c": -1.0})
    assert [each.tolist() for each in reduced] == [[2.0, 3.0, 30.0], [-1.0]]
