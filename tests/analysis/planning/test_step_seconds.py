"""The planned seconds of a step follow from its parts and from the stated assumptions."""

import pytest

from asterism.analysis.planning.model_size import measure_model
from asterism.analysis.planning.plan_inputs import GPUS, Assumptions
from asterism.analysis.planning.plan_table import build_plan_tables
from asterism.analysis.planning.run_plan import build_plan
from asterism.analysis.planning.step_seconds import compute_training_s, count_attention_flops, count_training_flops
from benchmarks.support.qwen3_models import read_qwen3
from tests.analysis.planning.shipped_plans import find, get_bytes, make_inputs, make_machines
from tests.consoles import capture


def test_the_reports_step_takes_216_s_on_64_mi300x_and_33_min_on_8_h200() -> None:
    """The step has 8,192 trajectories with 71M tokens. The FLOPs include the embedding, but not attention."""
    config = read_qwen3("14B")
    size = measure_model(config)
    flops = count_training_flops(size.total, 71e6)
    assert flops == pytest.approx(6.3e18, rel=0.01)
    assert compute_training_s(flops, 64, GPUS["mi300x"].flops, mfu=0.35) == pytest.approx(216, rel=0.01)
    assert compute_training_s(flops, 8, GPUS["h200"].flops, mfu=0.40) / 60 == pytest.approx(33, rel=0.01)
    # The FLOPs of a plan include attention, but not the lookup in the embedding of an untied model.
    attention = count_attention_flops(config, 8192, 71e6 / 8192)
    assert count_training_flops(size.active, 71e6, attention) / flops == pytest.approx(1.067, abs=0.005)


def test_training_time_is_inverse_to_the_assumed_mfu() -> None:
    slow, fast = (build_plan(make_inputs("4B", assumptions=Assumptions(mfu=mfu))).seconds for mfu in (0.2, 0.4))
    assert slow.training_s is not None
    assert fast.training_s is not None
    assert slow.training_s == pytest.approx(2 * fast.training_s)
    assert slow.generation_s == fast.generation_s


def test_generation_and_training_overlap_with_staleness() -> None:
    base = ("sglang.colocate=false", "sglang.memory_share=0.3")
    serial, parallel = (
        build_plan(make_inputs("4B", *base, f"rl.max_staleness={staleness}")).seconds for staleness in (0, 1)
    )
    assert serial.generation_s is not None
    assert serial.training_s is not None
    assert serial.step_s == serial.generation_s + serial.training_s
    assert parallel.step_s == max(serial.generation_s, serial.training_s)


def test_without_rl_the_plan_has_a_step_of_the_cold_start() -> None:
    config = read_qwen3("14B")
    for settings, tokens in (((), 524_288), (("sft.tokens_per_step=0",), 64 * 16_384)):
        inputs = make_inputs("14B", *settings, file="rstar2_cold_start", machines=make_machines("h200"))
        plan = build_plan(inputs)
        attention = count_attention_flops(config, tokens / 16_384, 16_384)
        assert (plan.trained_tokens, plan.generated_tokens, plan.batch_bytes) == (tokens, 0, 0)
        assert plan.seconds.training_flops == count_training_flops(measure_model(config).active, tokens, attention)
        assert plan.seconds.step_s == plan.seconds.training_s
        assert "trajectories" not in get_bytes(find(plan, "host memory"))
        assert "batches" not in get_bytes(find(plan, "disk"))
        text = capture(lambda console, plan=plan: console.print(build_plan_tables(plan)), 160)
        assert f"step of the cold start: at most {tokens:,} tokens\ntraining: " in text
        assert "generation" not in text
        assert "batch of a step" not in text
