"""The overheads that the SGLang benchmark computes from given rounds."""

from __future__ import annotations

import pytest

from benchmarks.support.sglang.overheads import RoundCost, compute_overheads

# Tokens, seconds, processor seconds of the client and of each of the server's processes.
BARE = RoundCost(1000, 1.0, 0.1, (0.2, 0.5))
STREAMED = RoundCost(1000, 1.1, 0.2, (0.3, 0.5))
ADAPTER = RoundCost(1000, 1.25, 0.2, (0.3, 0.6))


def test_an_overhead_is_the_share_of_the_tokens_per_s_that_the_adapter_loses():
    figures = compute_overheads([{"adapter": ADAPTER, "bare": BARE, "streamed": STREAMED}] * 3)
    assert (figures["tokens_per_s"], figures["tokens_per_s_bare"]) == (800, 1000)
    assert figures["overhead_64"] == pytest.approx(1 - 800 / 1000)
    assert figures["overhead_64_streamed"] == pytest.approx(1 - 1.1 / 1.25)
    assert figures["overhead_64_all"] == pytest.approx(1 - 0.8 / 1.1)
    assert figures["overhead_64_busiest"] == pytest.approx(1 - 0.5 / 0.6)
    assert (figures["client_us_per_token"], figures["server_us_per_token"]) == pytest.approx((200, 900))


def test_it_is_the_median_of_the_rounds_ratios_with_its_quartiles():
    slow = ADAPTER._replace(seconds=2.0)
    rounds = [{"adapter": each, "bare": BARE, "streamed": STREAMED} for each in (ADAPTER, slow, ADAPTER)]
    figures = compute_overheads(rounds)
    assert figures["overhead_64"] == pytest.approx(0.2)
    assert figures["overhead_64_low"] <= figures["overhead_64"] < figures["overhead_64_high"]


def test_an_attached_server_has_no_processor_time():
    rounds = [
        {
            way: each._replace(server_s=())
            for way, each in zip(("adapter", "bare", "streamed"), (ADAPTER, BARE, STREAMED), strict=True)
        }
    ] * 2
    assert not any("server_us" in key or "busiest" in key or "_all" in key for key in compute_overheads(rounds))
