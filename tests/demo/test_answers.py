import pytest
from neap_client import generate_request

from demo.answers import Pair, ask, median_speed_up
from neap_engine.cli.connection import connect
from tests.demo.conftest import measured


def test_an_answer_is_measured_without_what_the_prompt_gave(service):
    service.inference.router_version, shown = 4, []
    with connect(service.address) as client:
        answer = ask(client, generate_request("tiny", "a"), shown.append)
    assert (answer.version, answer.token_ids, answer.num_prompt_tokens, answer.decode_s) == (4, (1, 2), 3, 0.05)
    assert len(shown) == 4
    assert not answer.has_speed
    assert measured(0, 10.0).tokens_per_s == pytest.approx(10.0)
    assert measured(0, 10.0).tokens_per_pass == 2.0


def test_the_median_is_that_of_pairs_with_a_speed(pairs):
    short = Pair(measured(0, 10.0, num_tokens=7), measured(0, 90.0, num_tokens=7))
    assert median_speed_up([*pairs, short]) == pytest.approx(1.8)
    assert median_speed_up([short]) == 0.0
    assert not Pair(measured(0, 10.0), short.exact).is_same
