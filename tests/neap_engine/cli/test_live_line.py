"""What the live line of `neap up` says: sums of a worker, and exact over full, both of them measured."""

import pytest
from neap_client.inference.v1.inference_pb2 import LEARN_NEVER

from neap_engine.cli import live_line as module
from neap_engine.cli.connection import connect
from neap_engine.cli.live_line import Comparison, summed

EXPOSITION = """\
# TYPE neap_generation_tokens_total counter
neap_generation_tokens_total{model_id="a"} 30.0
neap_generation_tokens_total{model_id="b"} 12.0
# TYPE neap_request_success_total counter
neap_request_success_total{model_id="a",finished_reason="eos"} 2.0
neap_request_success_total{model_id="a",finished_reason="length"} 1.0
# TYPE neap_router_generation_tokens_total counter
neap_router_generation_tokens_total{model_id="a",router_version="1"} 30.0
# TYPE neap_exact_tokens_total counter
neap_exact_tokens_total{model_id="a",load="0"} 20.0
neap_exact_tokens_total{model_id="a",load="2"} 90.0
"""


def test_metrics_of_all_models_are_summed_and_answers_beside_others_not_compared():
    sums = summed(EXPOSITION)
    assert (sums["tokens"], sums["answers"], sums["executions"], sums["exact_tokens"]) == (42.0, 3.0, 0.0, 20.0)


class Worker:
    """What a worker's metrics say, while time goes on as a test says."""

    def __init__(self, comparison: Comparison, inference, clock) -> None:
        self.comparison, self.inference, self.clock = comparison, inference, clock
        self.sums = dict.fromkeys(module.METRICS.values(), 0.0)

    def serve(self, num_tokens: float, seconds: float, **others: float) -> int:
        """Some answers, and a look. Returns the number of requests for full depth until now."""
        self.clock.now_s += 5.0
        self.sums["exact_tokens"] += num_tokens
        self.sums["exact_s"] += seconds
        self.sums["tokens"] += num_tokens
        before = len(self.inference.requests)
        self.comparison.look(self.sums | others)
        if len(self.inference.requests) > before:
            self.sums["tokens"] += 2  # as the scripted worker gives
        return len(self.inference.requests)


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def worker(service, monkeypatch):
    """Full depth takes .1 s a token there."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with connect(service.address) as client:
        worker = Worker(Comparison(client, "tiny"), service.inference, clock)
        worker.serve(0, 0.0)
        yield worker


def test_exact_is_compared_with_full_depth_as_measured_right_after(worker):
    for n in range(3):
        assert worker.comparison.text() == ""
        assert worker.serve(64, 64 * 0.05) == n + 1
        worker.serve(0, 0.0)
        worker.serve(0, 0.0)
    assert worker.comparison.text() == ", exact 2.00x full"
    asked = worker.inference.requests[-1]
    assert asked.depth.WhichOneof("policy") == "full"
    assert (asked.learn, asked.priority) == (LEARN_NEVER, 100)
    assert (worker.comparison.num_answers, worker.comparison.num_tokens) == (3, 6)
    worker.comparison.begin_again()
    assert worker.comparison.text() == ""


def test_nothing_is_asked_for_while_others_run_or_too_little_was_served(worker):
    assert worker.serve(63, 1.0) == 0
    assert worker.serve(64, 1.0, running=1.0) == 0
    assert worker.serve(0, 0.0, waiting=1.0) == 0
    worker.clock.now_s += module.WINDOW_S + 1
    assert worker.serve(0, 0.0) == 0  # what was served is too long ago
    assert worker.serve(64, 1.0) == 1


def test_it_takes_a_fiftieth_of_the_time(worker, monkeypatch):
    def slow(request):
        worker.clock.now_s += 2.0

    worker.inference.on_generate = slow
    assert worker.serve(64, 1.0) == 1
    for _ in range(19):
        assert worker.serve(64, 1.0) == 1  # 95 s later
    worker.serve(64, 1.0)
    assert worker.serve(64, 1.0) == 2


def test_what_ran_beside_full_depth_spoils_the_comparison(worker):
    for _ in range(4):
        worker.serve(64, 1.0)
        worker.sums["tokens"] += 1
        worker.serve(0, 0.0)
        worker.serve(0, 0.0)
    assert worker.comparison.num_answers == 4
    assert worker.comparison.text() == ""
