"""Tests: training on 1, 2 and 4 ranks gives the same gradients and weights, with any sharding of parameters."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asterism.engine.learner.distributed import RankGroup, gather_full_parameters
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.train_ranks import RankScript, make_model, run_script

pytestmark = pytest.mark.slow
CASES = [*((stage, is_tied) for stage in ("sft", "rl", "recomputed") for is_tied in (True, False)), ("experts", True)]


class Outcome(msgspec.Struct):
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]  # gradients of the first update, before which all ranks have equal weights
    metrics: list[dict[str, float]]
    state: dict[str, Any]


def read_outcome(script: RankScript) -> Outcome:
    folder = Path(script.out)
    return Outcome(
        torch.load(folder / "parameters.pt", weights_only=True),
        torch.load(folder / "gradients.pt", weights_only=True),
        json.loads((folder / "metrics.json").read_text()),
        json.loads((folder / "state.json").read_text()),
    )


def train(ranks: int, *scripts: RankScript) -> list[Outcome]:
    """Run all scripts in one set of rank processes, or in this process for a single rank without a mesh."""
    if ranks == 1 and scripts[0].learner.get("dtype", "float32") == "float32":
        for script in scripts:
            run_script(script, RankGroup())
    else:
        run_ranks(ranks, "train_ranks", msgspec.json.encode(scripts).decode())
    return [read_outcome(script) for script in scripts]


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """Return the norm and the largest element of the difference, relative to the norm of `one`."""
    x, y = (torch.cat([each[name].double().flatten() for name in one]) for each in (one, other))
    return float((x - y).norm() / x.norm()), float((x - y).abs().max() / x.norm())


def are_equal(one: Outcome, other: Outcome) -> bool:
    """Compare in float32, without elements with gradients near 0: Adam amplifies the rounding of their gradients."""
    _, largest = differences(one.gradients, other.gradients)
    bound = 1e-7 * max(float(gradient.abs().max()) for gradient in one.gradients.values())
    kept = {name: gradient.abs() > bound for name, gradient in one.gradients.items()}
    assert sum(int(each.sum()) for each in kept.values()) > 0.9 * sum(each.numel() for each in kept.values())
    mine, theirs = ({name: each.parameters[name][kept[name]] for name in kept} for each in (one, other))
    norm, _ = differences(mine, theirs)
    return norm <= 1e-6 and largest <= 1e-6


def without_plan(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in ("fill", "imbalance")}


def make_scripts(folder: Path, chunk_tokens: int = 0, **learner: Any) -> list[RankScript]:
    return [
        RankScript(
            stage, str(folder / f"{stage}_{is_tied}"), is_tied=is_tied, learner=learner, chunk_tokens=chunk_tokens
        )
        for stage, is_tied in CASES
    ]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"activation_checkpointing": "selective", "reduce_gradients": "once"}),
        pytest.param(4, {"activation_checkpointing": "full"}, marks=pytest.mark.nightly),
        pytest.param(2, {}, marks=pytest.mark.nightly),
    ],
)
def test_gradients_and_parameters_do_not_depend_on_ranks_and_micro_batches(
    ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """The ranks have different numbers of chunks of logits."""
    alone = train(1, *make_scripts(tmp_path / "alone"))
    together = train(ranks, *make_scripts(tmp_path / "together", chunk_tokens=5, micro_batch_tokens=40, **options))
    for (stage, is_tied), one, several in zip(CASES, alone, together, strict=True):
        start = gather_full_parameters(make_model(stage, is_tied=is_tied))
        assert differences(one.parameters, start)[0] > 1e-3
        assert are_equal(one, several)
        for mine, other in zip(one.metrics, several.metrics, strict=True):
            assert without_plan(mine) == pytest.approx(without_plan(other), rel=1e-3, abs=1e-6)
        assert {form["is_sharded"] for form in several.state["parameters"].values()} == {True}


@pytest.mark.nightly
def test_compiled_layers_of_two_ranks_give_the_same_update(tmp_path: Path) -> None:
    """The cases have recomputed activations, experts, or adapters with a reference."""

    def make_cases(name: str, **settings: Any) -> list[RankScript]:
        plain = [
            RankScript("recomputed", str(tmp_path / name / "recomputed"), end=2, learner=settings),
            RankScript("sft", str(tmp_path / name / "sft"), end=2, is_tied=False, learner=settings),
        ]
        experts = RankScript("experts", str(tmp_path / name / "experts"), end=2, learner=settings)
        full = settings | {"activation_checkpointing": "full"}
        adapted = full | {"rank": 2, "kl_coef": 0.1, "lr": 1e-3}
        return [*plain, experts, RankScript("adapted", str(tmp_path / name / "adapted"), end=2, learner=adapted)]

    alone = train(1, *make_cases("alone"))
    together = train(2, *make_cases("together", compile=True, micro_batch_tokens=40))
    for one, two in zip(alone, together, strict=True):
        assert are_equal(one, two)
        assert {form["is_sharded"] for form in two.state["parameters"].values()} == {True}


@pytest.mark.nightly
def test_two_copies_of_two_shards_give_the_same_update(tmp_path: Path) -> None:
    alone = train(1, *make_scripts(tmp_path / "alone")[:4])
    together = train(4, *make_scripts(tmp_path / "together", ranks=4, dp_replicate=2)[:4])
    for one, four in zip(alone, together, strict=True):
        assert are_equal(one, four)
        shares = [form["local_share"] for form in four.state["parameters"].values()]
        assert shares == pytest.approx([0.5] * len(shares), abs=0.01)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_bfloat16_computes_with_float32_weights_gradients_and_moments(ranks: int, tmp_path: Path) -> None:
    cases = (0, 1, 4, 5)  # cases with the same old log probabilities in both dtypes
    exact, rounded = (
        [make_scripts(tmp_path / dtype, dtype=dtype)[case] for case in cases] for dtype in ("float32", "bfloat16")
    )
    for one, other in zip(train(1, *exact), train(ranks, *rounded), strict=True):
        forms = other.state["parameters"].values()
        assert {(form["is_sharded"], form["dtype"]) for form in forms} == {(ranks > 1, "torch.float32")}
        assert other.state["gradients"] == other.state["optimizer"] == ["torch.float32"]
        assert 1e-5 < differences(one.parameters, other.parameters)[0] < 0.01
        assert 1e-3 < differences(one.gradients, other.gradients)[0] < 0.1
        for mine, theirs in zip(one.metrics, other.metrics, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.03)


@pytest.mark.parametrize(
    ("first", "second"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in [(1, 2), (2, 4), (4, 1)])],
)
def test_a_checkpoint_is_resumable_with_another_number_of_ranks(first: int, second: int, tmp_path: Path) -> None:
    """The export is rounded, and all ranks write it."""
    (straight,) = train(1, RankScript("rl", str(tmp_path / "straight"), end=4))
    exports = {"export_dtype": "bfloat16"}
    middle = RankScript("rl", str(tmp_path / "middle"), end=2, saves=True, max_shard_bytes=20_000, learner=exports)
    (saved,) = train(first, middle)
    checkpoint = Path(middle.out) / "checkpoint"
    exported = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).state_dict()
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 2
    assert all(torch.equal(exported[name], each.bfloat16()) for name, each in saved.parameters.items())
    (end,) = train(second, RankScript("rl", str(tmp_path / "end"), 2, 4, checkpoint=str(checkpoint)))
    assert differences(straight.parameters, end.parameters)[0] <= 1e-6
