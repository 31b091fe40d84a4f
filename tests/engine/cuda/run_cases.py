"""`python -m benchmarks.support.fake_cuda tests.engine.cuda.run_cases GROUPS`: runs the cases of these groups.

The last line is JSON. The groups are learner, engine, sampling, wide, parts, planted, nightly. Each case has its own fake CUDA.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.model.causal_lm import DecoderLayer
from benchmarks.gpu.training import make_sequences
from benchmarks.support.fake_cuda.fake_steps import (
    DEVICE,
    StepCosts,
    build_fake_model,
    build_fake_trainer,
    measure_rl_step,
    measure_step_costs,
)
from benchmarks.support.fake_cuda.inductor_counts import count_compiled_part
from benchmarks.support.fake_cuda.operation_costs import KernelCount, is_on_cuda
from benchmarks.support.fake_cuda.operation_log import OperationLog, running_fake_cuda
from tests.engine.cuda.case_reports import CaseReport, PartCount
from tests.engine.cuda.case_table import (
    ENGINE_CASES,
    LEARNER_CASES,
    NIGHTLY_CASES,
    PART_CASES,
    PLANTED_CASES,
    SAMPLING_CASES,
    SAMPLING_VOCABULARY,
    WIDE_CASES,
    EngineCase,
    LearnerCase,
    SamplingCase,
    WideCase,
)
from tests.engine.cuda.checked_collectives import NoGroup, checking_collectives
from tests.engine.cuda.planted_defects import DEFECTS
from tests.engine.learner.learner_settings import make_learner
from tests.engine.tiny_models import random_ids, small_architecture, small_config

_LENGTHS = (30, 20, 14)  # numbers of tokens of the sequences in a learner case
_MODEL = make_learner(device="cuda", dtype="bfloat16")


def run_learner_case(case: LearnerCase, log: OperationLog) -> StepCosts:
    config, learner = small_architecture(case.model_type), case.build_learner()
    ranks = RankGroup(device=DEVICE, tensor_group=cast(Any, NoGroup()))
    trainer = build_fake_trainer(config, learner, sft=case.sft, ranks=ranks)
    sequences = make_sequences(_LENGTHS, config.vocab_size, groups=2, prompt_tokens=case.prompt_tokens)

    def step() -> dict[str, float]:
        metrics = trainer.run_rl_step(sequences) if case.sft is None else trainer.run_sft_step(sequences)
        assert (metrics["shared_prompt_share"] > 0) == (case.prompt_tokens > 1)
        return metrics

    if case.checks_weights:
        return measure_step_costs(log, lambda: trainer.check_weights() or {}, 1, warmups=0)
    return measure_step_costs(log, step, 1, updates=learner.minibatches, warmups=0)


# ---------------------------------------------------------------- the embedded engine


class _FakeCapture:
    """A GraphCapture that counts a graph as one kernel, and lists operations that a graph must not contain."""

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        self.waits: list[str] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        syncs, copies = len(self._log.syncs), len(self._log.copies)
        with torch.no_grad():
            run()
        self.waits += [each.site.place for each in (*self._log.syncs[syncs:], *self._log.copies[copies:])]
        return lambda: self._log.record_kernels("graph", KernelCount(1), self._log.find_site())


def run_engine_case(case: EngineCase, log: OperationLog) -> tuple[StepCosts, list[str]]:
    """Run one phase of the engine, after the steps that the phase requires."""
    capture = _FakeCapture(log)
    torch.set_default_dtype(getattr(torch, case.dtype))
    model = build_fake_model(small_config(), _MODEL)
    torch.set_default_dtype(torch.float32)
    prefill_tokens, graphs = 25 if case.phase == "chunk" else 512, capture if case.has_graphs else None
    core = EngineCore(model, Capacity(1024, 16, 96), prefill_tokens=prefill_tokens, capture=graphs, overlaps_steps=True)
    for number in range(6):
        core.submit(
            GenerationRequest(number, random_ids(20 + 3 * number, number), 60, Sampling(**case.sampling), seed=number)
        )
    changes: dict[str, Callable[[], object]] = {"weights": lambda: core.on_weights_changed(1), "prefill": core.step}
    if case.phase != "prefill":
        core.step()
        core.step()
    if case.phase == "decode after weights":
        core.on_weights_changed(1)
        core.step()
    action = changes.get(case.phase, core.step)
    return measure_step_costs(log, lambda: (action() and {}) or {}, 1, warmups=0), capture.waits


def run_sampling_case(case: SamplingCase, log: OperationLog) -> tuple[StepCosts, list[str]]:
    """Run the second decode step of a small model with a wide vocabulary. The peak is the memory of this step."""
    capture = _FakeCapture(log)
    model = build_fake_model(small_config(vocab_size=SAMPLING_VOCABULARY), _MODEL)
    capacity = Capacity(64 * case.rows, 16, 64)
    core = EngineCore(model, capacity, capture=capture if case.has_graphs else None, max_running=case.rows)
    for number in range(case.rows):
        core.submit(GenerationRequest(number, random_ids(2, number), 60, Sampling(**case.sampling), seed=number))

    def step() -> dict[str, float]:
        core.step()
        return {}

    step()
    before = log.memory.live_bytes
    costs = measure_step_costs(log, step, 1, warmups=0)
    return costs._replace(peak_bytes=costs.peak_bytes - before), capture.waits


# ---------------------------------------------------------------- wide models


def run_wide_case(case: WideCase, log: OperationLog) -> StepCosts:
    learner = make_learner(
        device="cuda",
        dtype="bfloat16",
        activation_checkpointing=cast(Any, case.mode),
        compile=case.compiles,
        old_logprobs="engine",
        correction="none",
        mismatch_limit=0.0,
    )
    return measure_rl_step(log, case.build_config(), case.tokens, learner)


def run_part_case(part: str, log: OperationLog) -> StepCosts:
    """Count the kernels of one compiled part of a layer, forward and backward. The step contains no other part."""
    config = small_architecture("qwen3")
    layer = build_fake_model(config, _MODEL).model.layers[0]
    options: Any = {"dtype": torch.bfloat16, "device": DEVICE}
    x_BTE = torch.empty(1, 64, config.hidden_size, requires_grad=True, **options)
    cos, sin = (torch.empty(1, 64, 1, config.head_dim, **options) for _ in range(2))
    attended_BTHD = torch.empty(1, 64, config.num_heads, config.head_dim, requires_grad=True, **options)
    inputs = (x_BTE, cos, sin) if part == "project" else (x_BTE, attended_BTHD)
    count = count_compiled_part(getattr(DecoderLayer, part), layer, *inputs)
    parts: Any = {"forward": count.forward, "backward": count.backward}
    return StepCosts(parts, 1, 1, log.syncs, log.copies, log.mixed, 0, "")


# ---------------------------------------------------------------- reports


def report_case(run: Callable[[OperationLog], Any]) -> CaseReport:
    """Run a case and return its report. A report of an error also lists the earlier operations on mixed devices."""
    wrong: list[str] = []
    sent: list[str] = []

    def check(name: str, tensor: Tensor, _group: Any) -> None:
        sent.append(name)
        if not is_on_cuda(tensor) or not tensor.numel():
            wrong.append(f"{name} of {tuple(tensor.shape)} on {tensor.device}")

    with running_fake_cuda() as log, checking_collectives(check, calls=False):
        try:
            found = run(log)
        except Exception:
            mixed = [f"{each.operation} at {each.site.place}" for each in log.mixed]
            return CaseReport(error=traceback.format_exc()[-3000:], mixed_devices=mixed, collectives=wrong)
        costs, waits = found if isinstance(found, tuple) and not isinstance(found, StepCosts) else (found, [])
    return _describe(costs, waits, wrong, len(sent))


def _describe(costs: StepCosts, waits: list[str], wrong: list[str], sent: int) -> CaseReport:
    return CaseReport(
        updates=costs.updates,
        syncs=[each.site.place for each in costs.syncs],
        captured_waits=waits,
        pageable_copies=[each.site.place for each in costs.copies if each.is_pageable],
        blocking_copies=[each.site.place for each in costs.copies if each.is_blocking],
        mixed_devices=[f"{each.operation} at {each.site.place}" for each in costs.mixed],
        collectives=wrong,
        sent=sent,
        parts={
            name: PartCount(part.kernels, part.total_bytes, part.product_flops + part.attention_flops)
            for name, part in costs.parts.items()
        },
        peak_bytes=costs.peak_bytes,
        peak_place=costs.peak_place,
    )


_GROUPS: Mapping[str, tuple[Mapping[str, Any], Callable[[Any, OperationLog], Any]]] = {
    "learner": (LEARNER_CASES, run_learner_case),
    "engine": (ENGINE_CASES, run_engine_case),
    "sampling": (SAMPLING_CASES, run_sampling_case),
    "wide": (WIDE_CASES, run_wide_case),
    "parts": (PART_CASES, run_part_case),
}


def report_named_case(group: str, name: str) -> CaseReport:
    cases, run = _GROUPS[group]
    return report_case(lambda log: run(cases[name], log))


def report_planted_case(defect: str) -> CaseReport:
    with DEFECTS[defect]():
        return report_named_case(*PLANTED_CASES[defect])


def report_group(group: str) -> dict[str, CaseReport]:
    if group == "planted":
        return {defect: report_planted_case(defect) for defect in PLANTED_CASES}
    if group == "nightly":
        places = [(each, name) for each, (cases, _) in _GROUPS.items() for name in cases if name in NIGHTLY_CASES]
        return {name: report_named_case(each, name) for each, name in places}
    return {name: report_named_case(group, name) for name in _GROUPS[group][0] if name not in NIGHTLY_CASES}


def main(groups: list[str]) -> None:
    reports = {name: report for group in groups for name, report in report_group(group).items()}
    sys.stdout.write(msgspec.json.encode(reports).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
