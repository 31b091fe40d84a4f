"""Run the short form of the benchmark of the SGLang engine against a running server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.bench import SharedServer
from tests.sglang.environment import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.sglang, pytest.mark.timeout(1800)]

CLIENTS = ("", "_bare", "_streamed")
RATES = (
    *(f"tokens_per_s{client}" for client in CLIENTS),
    *(f"client_us_per_token{client}" for client in CLIENTS),
    "tokens_per_s_1000",
)
OVERHEADS = ("overhead_64", "overhead_64_low", "overhead_64_high", "overhead_64_streamed")
CROWD = ("in_flight", "in_flight_at_server", "lost", "mixed_up")
EVIDENCE = ("told_apart", "own_difference", "neighbours_difference")


def test_no_response_of_a_thousand_concurrent_requests_is_lost_or_swapped(roomy: SharedServer, model: Path):
    command = [sys.executable, "-m", "benchmarks.sglang", "--quick", "--url", roomy.server.url, "--model", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {*RATES, *OVERHEADS, *CROWD, *EVIDENCE}
    assert (figures["in_flight"], figures["lost"], figures["mixed_up"]) == (1000, 0, 0), done.stdout
    assert figures["told_apart"] > 0.95
    assert min(figures[rate] for rate in RATES) > 0
