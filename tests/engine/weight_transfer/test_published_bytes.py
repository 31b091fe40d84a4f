"""The learner keeps weights on its GPU only for an engine there (other conditions: configs/schema/machines.py)."""

import pytest
import torch

from asterism.engine.inference.embedded import select_device
from asterism.engine.learner import distributed


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_the_first_engine_and_the_only_rank_use_the_same_gpu(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    of_rank = distributed._find_device("cuda")  # pyright: ignore[reportPrivateUsage]
    assert select_device("cuda", 0) == of_rank
