"""The bus benchmark, in its short form and with fewer peers: every figure is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEYS = {
    *("ratio_to_pyzmq_asyncio", "messages_per_s", "round_trip_p50_us", "round_trip_p99_us", "peers"),
    *("log_events_per_s", "story_ms_1m_events", "streamed_messages", "sender_mib", "receiver_mib"),
}


def test_the_last_line_holds_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.bus", "--quick", "--peers", "50", "--events", "10000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) >= KEYS
    assert all(figures[key] > 0 for key in KEYS)
    assert figures["peers"] == 50
