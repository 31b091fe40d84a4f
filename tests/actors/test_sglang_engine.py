"""What the configuration makes of a generator's SGLang engine: its server, its log, its way of weights, its time to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors import sglang_engine
from actors.wiring import stops_within_s
from configs.load import load_run
from configs.run_folder import RunFolder
from configs.schema import Run
from configs.sglang import Sglang
from engine.sglang.attached import AttachedServer
from engine.sglang.engine import OFTEN, SELDOM
from engine.sglang.server import ENDS_WITHIN_S
from engine.sglang.weights import WeightsWay
from engine.sglang.weights.disk import DiskWeights
from engine.sglang.weights.group import GroupWeights
from engine.sglang.weights.tensor import TensorWeights

FOLDER = RunFolder(Path("/runs/demo"))


class Made:
    """What an engine was made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process: str, *settings: str, life: int = 1) -> None:
        run = load_run(None, ["name=demo", "engine.kind=sglang", "engine.num_engines=3", *settings])
        made: dict[str, Any] = {}

        def engine(server: object, weights: object, **options: object) -> None:
            made.update(options, server=server, weights=weights)

        def layout(model: Path, dtype: object) -> None:
            made.update(dtype=dtype)

        def started(wanted: object, **options: object) -> None:
            made.update(options)

        monkeypatch.setattr(sglang_engine, "SGLangEngine", engine)
        monkeypatch.setattr(sglang_engine, "PublishedLayout", layout)
        if not run.sglang.attach:
            monkeypatch.setattr(sglang_engine, "SGLangServer", started)
        sglang_engine.sglang_engine(run, Path("/model"), FOLDER, process, version=-1, lost=print, life=life)
        self.of: dict[str, Any] = made


def test_a_server_has_the_number_of_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Made(monkeypatch, "generator-2").of
    assert of["log"] == FOLDER.logs / "sglang-2.log"
    assert of["scratch"] == FOLDER.sockets / "sglang-2"
    assert (of["index"], of["version"]) == (2, -1)


def test_on_a_node_that_joined_its_log_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Made(monkeypatch, "generator-0@1").of
    assert of["log"] == FOLDER.logs / "sglang-0@1.log"
    assert of["index"] == 0  # its port is one of this machine


def test_an_engine_attaches_to_the_server_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = 'sglang.attach=["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3/"]'
    server = Made(monkeypatch, "generator-2", attach).of["server"]
    assert isinstance(server, AttachedServer)
    assert server.url == "http://127.0.0.1:3"


def test_a_server_that_a_former_life_was_attached_to_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def attached(wanted: object, *, index: int, again: bool) -> None:
        made.append(again)

    monkeypatch.setattr(sglang_engine, "AttachedServer", attached)
    for life in (1, 2):
        Made(monkeypatch, "generator-0", 'sglang.attach=["http://127.0.0.1:1"]', "engine.num_engines=1", life=life)
    assert made == [False, True]


@pytest.mark.parametrize(("way", "kind"), [("disk", DiskWeights), ("tensor", TensorWeights), ("group", GroupWeights)])
def test_weights_come_the_way_that_is_said(monkeypatch: pytest.MonkeyPatch, way: str, kind: type[WeightsWay]) -> None:
    of = Made(monkeypatch, "generator-0", f"sglang.weights={way}", "engine.dtype=bfloat16").of
    assert isinstance(of["weights"], kind)
    assert str(of["dtype"]) == "torch.bfloat16"


@pytest.mark.parametrize(
    ("setting", "interval"),
    [
        ("rl.max_staleness=0", SELDOM),
        ("rl.max_staleness=1", OFTEN),
        ("rl.oversubscribe=1.5", OFTEN),
    ],
)
def test_turns_are_looked_into_often_only_where_something_happens_in_their_middle(
    monkeypatch: pytest.MonkeyPatch, setting: str, interval: int
) -> None:
    assert Made(monkeypatch, "generator-0", "rl.prompts=8", setting).of["stream_interval"] == interval


def test_a_generator_with_a_server_has_longer_to_end_than_its_server() -> None:
    served, embedded = load_run(None, ["name=a", "engine.kind=sglang"]), Run(name="a")
    assert stops_within_s(served, "generator-0@1") > 2 * ENDS_WITHIN_S
    assert stops_within_s(served, "learner") == stops_within_s(embedded, "generator-0") < 2 * ENDS_WITHIN_S


def test_a_servers_start_is_not_a_life_that_forgives() -> None:
    served = Run(name="a", engine=load_run(None, ["name=a", "engine.kind=sglang"]).engine, sglang=Sglang(start_s=7.0))
    assert served.engine_starts_within_s == 7.0
    assert Run(name="a").engine_starts_within_s == 0.0


def test_a_process_imports_no_engine_before_it_has_one() -> None:
    """Heads and rollouts are this program too."""
    code = "import actors.process, sys; sys.exit(bool({'torch', 'aiohttp', 'engine.sglang.engine'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
