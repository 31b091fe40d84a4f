"""The benchmark of a real model: its limits, its workload, and the environments of the servers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asterism.engine.hf.model_config import DecoderConfig
from benchmarks.real.decode_rates import TokenStreamer
from benchmarks.real.machine_limits import MachineLimits
from benchmarks.real.peer_servers import PEERS, PeerFailed, check_peer
from benchmarks.real.real_workload import RealWorkload, draw_prompts, draw_training_sequences
from benchmarks.support.engine_rate import DecodeClock
from tests.benchmarks.programs import ROOT, run_program
from tests.sglang.serving import save_tiny_model

# Each of 2 layers has 16 + 8 + 8 + 16 + 3 * 32 = 144 weights in products and 8 in norms; the embedding has 40, a norm 4.
CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=10,
    hidden_size=4,
    intermediate_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    tie_word_embeddings=True,
)
WORK = RealWorkload(Path("model"), CONFIG, "float32", threads=1, repeats=1)
SLOW_MEMORY = MachineLimits(CONFIG, bytes_per_value=4, gflops=1e6, bytes_per_s=1000.0)
SLOW_PRODUCTS = MachineLimits(CONFIG, bytes_per_value=4, gflops=1e-6, bytes_per_s=1e15)


def test_a_decode_step_reads_all_weights_and_the_cache_of_each_sequence() -> None:
    weights, values_per_token = 2 * (144 + 8) + 40 + 4, 2 * 2 * 1 * 2
    step_s = (weights + 3 * 5 * values_per_token) * 4 / 1000
    assert SLOW_MEMORY.compute_decode_rate(batch=3, cached_tokens=5) == pytest.approx(3 / step_s)


def test_a_decode_step_computes_all_products_and_attention_for_each_sequence() -> None:
    operations = 2 * 2 * 144 + 2 * 40 + 5 * 4 * 2 * 2 * 2
    assert SLOW_PRODUCTS.compute_decode_rate(batch=3, cached_tokens=5) == pytest.approx(1000 / operations)


def test_whole_requests_compute_the_prompt_once_and_a_step_for_each_later_token() -> None:
    prefill = 5 * 2 * 2 * 144 + 2 * 40 + (5 * 6 / 2) * 4 * 2 * 2 * 2
    later = sum(2 * 2 * 144 + 2 * 40 + cached * 4 * 2 * 2 * 2 for cached in (6, 7))
    rate = SLOW_PRODUCTS.compute_request_rate(batch=1, prompt_tokens=5, new_tokens=3)
    assert rate == pytest.approx(3 * 1000 / (prefill + later))


def test_training_takes_three_times_the_operations_of_a_forward_pass() -> None:
    forward = 5 * 2 * 2 * 144 + 2 * 2 * 40 + (5 * 6 / 2) * 4 * 2 * 2 * 2
    assert SLOW_PRODUCTS.compute_training_rate([5], num_scored=2) == pytest.approx(5 * 1000 / (3 * forward))


def test_the_decode_clock_starts_when_each_sequence_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((100.0, 104.0))
    monkeypatch.setattr("benchmarks.support.engine_rate.time.perf_counter", lambda: next(now))
    clock = DecodeClock(2)
    for row, tokens in ((0, 3), (1, 1), (0, 2), (1, 4)):
        clock.count(row, tokens)
    assert clock.compute_rate() == (2 + 4) / 4.0


def test_the_streamer_counts_tokens_but_not_prompts() -> None:
    counted: list[tuple[int, int]] = []

    class RecordingClock(DecodeClock):
        def count(self, row: int, tokens: int) -> None:
            counted.append((row, tokens))

    streamer = TokenStreamer(RecordingClock(2))
    streamer.put(torch.zeros(2, 7))
    streamer.put(torch.zeros(2))
    assert counted == [(0, 1), (1, 1)]


def test_each_repeat_has_prompts_of_its_own() -> None:
    first, again, next_prompts = draw_prompts(WORK, 4, 0), draw_prompts(WORK, 4, 0), draw_prompts(WORK, 4, 1)
    assert first.shape == (4, 160)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, next_prompts)


def test_the_rollouts_of_a_group_share_their_prompt_only() -> None:
    sequences = draw_training_sequences(WORK, seed=0)
    assert len(sequences) == 32
    heads = {each.group_id: each.token_ids[:160].tobytes() for each in sequences}
    assert len(set(heads.values())) == 4
    assert all(each.token_ids[:160].tobytes() == heads[each.group_id] for each in sequences)
    assert all(not each.loss_mask[:160].any() and each.loss_mask[160:].all() for each in sequences)
    assert all(48 <= each.num_loss_tokens <= 240 for each in sequences)


@pytest.mark.parametrize("name", PEERS)
def test_a_missing_environment_names_the_command_that_makes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, name, PEERS[name]._replace(python=Path("/nowhere/python")))
    with pytest.raises(PeerFailed, match=f"run `make {name}-environment`, or leave it out: --without {name}"):
        check_peer(name)


@pytest.mark.slow
def test_without_a_model_the_benchmark_names_the_flag() -> None:
    command = [sys.executable, "-m", "benchmarks.real"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--model: name the folder of a model" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_part_prints_its_figures(dtype: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    figures = run_program("real --quick --dtype", dtype, "--model", str(model))
    assert figures["limits"]["bandwidth_gb_per_s"] > 0
    assert {f"float32_gflops_{name}" for name in ("square", "model_1", "model_4")} <= set(figures["limits"])
    assert set(figures["requests"]) == {
        f"{name}_{batch}"
        for name in ("tokens_per_s", "vllm_tokens_per_s", "sglang_tokens_per_s", "ratio", "limit_tokens_per_s")
        for batch in (1, 4)
    } | {"share_of_limit_1", "share_of_limit_4"}
    rates = ("tokens_per_s", "transformers_tokens_per_s", "ratio", "limit_tokens_per_s", "share_of_limit")
    assert set(figures["decode"]) == {f"{name}_{batch}" for name in rates for batch in (1, 4)}
    assert set(figures["training"]) == set(rates)
    assert all(value > 0 for part in ("limits", "decode", "requests", "training") for value in figures[part].values())
