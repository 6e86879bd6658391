"""Which workers run, and environments that are not set up twice."""

import sys
from pathlib import Path

import pytest

from bench.peers.catalogue import PEERS, Choice, parse_choices
from bench.peers.environment import Environment, Requirements, SetUpFailed
from shared.errors import InvalidInput


def test_a_peer_is_named_with_or_without_formats() -> None:
    assert parse_choices("llama.cpp:Q8_0,float32") == [Choice("llama.cpp", "Q8_0"), Choice("llama.cpp", "float32")]
    assert [choice.weights for choice in parse_choices("openvino")] == ["float32", "int8"]
    with pytest.raises(InvalidInput, match="not one of"):
        parse_choices("ollama")
    with pytest.raises(InvalidInput, match="not as int4"):
        parse_choices("openvino:float32,int4")


def test_what_a_peer_is_measured_with_is_pinned() -> None:
    for peer in PEERS.values():
        needed = peer.requirements or Requirements()
        for requirement in (*needed.packages, *needed.build, *filter(None, [needed.source])):
            assert "==" in requirement


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    said: list[str] = []
    environment = Environment(tmp_path / "peer", Requirements())
    (tmp_path / "peer" / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "peer" / "venv" / "bin" / "pip").touch()
    environment.python.symlink_to(sys.executable)
    environment.ensure(said.append)
    environment.ensure(said.append)
    assert len(said) == 1
    Environment(tmp_path / "peer", Requirements(excluded=())).ensure(said.append)
    assert len(said) == 1


@pytest.mark.full
def test_a_failed_step_is_done_again_and_says_where_its_log_is(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "peer", Requirements(packages=("no such package",)))
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(SetUpFailed, match=r"pip-install failed .*pip-install\.log"):
            environment.ensure(said.append)
    assert len(said) == 2
