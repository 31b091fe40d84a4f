"""What of a server does not fit a run is said by the key to change, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import Engine
from engine.checkpoint import save_model
from engine.sglang.fit import ServerUnusable, check_fit
from tests.engine.sglang.servers import info, wanted
from tests.engine.tiny_models import small_config, small_model, write_tokenizer


def save(folder: Path, vocab_size: int = 97, seed: int = 0) -> Path:
    (folder / "tokenizer").mkdir(parents=True)
    write_tokenizer(folder / "tokenizer")
    model = small_model(seed, vocab_size=vocab_size)
    save_model(folder / "model", small_config(vocab_size=vocab_size), model.state_dict(), folder / "tokenizer")
    return folder / "model"


def complaints(server: object, of_the_run: object) -> list[str]:
    with pytest.raises(ServerUnusable) as caught:
        check_fit(server, of_the_run, "the server")  # pyright: ignore[reportArgumentType]
    return str(caught.value).splitlines()


def test_a_server_that_fits_is_taken():
    check_fit(info(), wanted(), "the server")


def test_a_longest_trajectory_just_fits_or_just_does_not():
    check_fit(info(max_req_input_len=192), wanted(), "the server")
    assert complaints(info(max_req_input_len=191, context_length=197), wanted()) == [
        "dialogue.prompt_tokens + response_tokens = 192: the server takes no more than 191"
        " (its --context-length is 197, 200 is enough)"
    ]


def test_no_more_tokens_are_leased_than_all_copies_of_the_model_have_room_for():
    check_fit(info(max_total_num_tokens=4096, dp_size=2), wanted(), "the server")
    assert complaints(info(max_total_num_tokens=4000, dp_size=2), wanted()) == [
        "engine.kv_tokens = 8192: the server has room for 8000; 0 takes what it has"
    ]
    check_fit(info(max_total_num_tokens=64), wanted(engine=Engine(kind="sglang", kv_tokens=0)), "the server")


@pytest.mark.parametrize("way", ["tensor", "group"])
def test_a_server_with_two_copies_of_the_model_gets_its_weights_by_disk(way: str):
    assert complaints(info(dp_size=2), wanted(weights=way)) == [
        f'sglang.weights = "{way}": the server has 2 copies of the model and takes weights by "disk" alone'
    ]
    check_fit(info(dp_size=2), wanted(weights="disk"), "the server")


def test_a_model_of_the_same_shape_fits_and_another_does_not(tmp_path: Path):
    one, alike, other = save(tmp_path / "1"), save(tmp_path / "2", seed=1), save(tmp_path / "3", vocab_size=98)
    check_fit(info(model_path=str(alike)), wanted(one), "the server")
    assert complaints(info(model_path=str(other)), wanted(one)) == [
        f"model.checkpoint = {one}: the server has another model, {other}"
    ]


def test_a_model_that_cannot_be_read_from_here_is_known_by_its_path_alone(tmp_path: Path):
    check_fit(info(model_path="/elsewhere/one/"), wanted("/elsewhere/../elsewhere/one"), "the server")
    assert complaints(info(model_path="/elsewhere/two"), wanted("/elsewhere/one")) == [
        "model.checkpoint = /elsewhere/one: the server has another model, /elsewhere/two"
    ]


def test_all_that_does_not_fit_is_said_at_once():
    server = info(max_req_input_len=10, max_total_num_tokens=16, model_path="/other", dp_size=2)
    said = complaints(server, wanted(weights="group"))
    assert [line.split(" = ")[0] for line in said] == [
        "dialogue.prompt_tokens + response_tokens",
        "engine.kv_tokens",
        "model.checkpoint",
        "sglang.weights",
    ]
