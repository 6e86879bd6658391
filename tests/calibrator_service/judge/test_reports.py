"""What reports tell: whatever comes twice, late, forged or from another start of a worker changes nothing, or is
refused."""

import math

import pytest

from calibrator_service.judge.reports import MAX_WORKERS, ReportBook
from shared.errors import InvalidInput
from shared.served import MAX_SERVED, NOTHING, Served, ServedKey

KEY = ServedKey("latest", 3, 0)
ONE = Served(2, 40, 25, 30, 1.0, 1.4, 40.0, 40 * math.log(1 / 40))
WORKER, MODEL = "a" * 32, "tiny"


def times(count: float) -> Served:
    return Served._make(count * value for value in ONE)


class Book(ReportBook):
    """One whose worker has begun."""

    now_s = 1000.0

    def __init__(self) -> None:
        super().__init__()
        assert self.send(1, {}) == []

    def send(self, sequence, sums, *, sender="one", worker=WORKER, model=MODEL):
        self.now_s += 10.0
        return self.take(sender, worker, model, sequence, sums, self.now_s)


def test_what_is_new_counts_once():
    book = Book()
    assert book.send(2, {KEY: times(1)}) == [(KEY, ONE)]
    assert book.send(2, {KEY: times(1)}) is None  # again
    ((key, new),) = book.send(5, {KEY: times(4)})  # 3 and 4 were lost
    assert (key, new) == (KEY, pytest.approx(times(3)))
    assert book.send(4, {KEY: times(3)}) is None  # late
    assert book.send(6, {KEY: times(4)}) == []
    other = ServedKey("latest", 3, 2)
    assert book.send(7, {KEY: times(4), other: ONE}) == [(other, ONE)]


def test_a_worker_that_starts_again_begins_at_nothing():
    book = Book()
    assert book.send(2, {KEY: times(5)})
    assert book.send(1, {KEY: times(7)}, worker="b" * 32) == []  # served before it was known
    assert book.send(2, {KEY: times(8)}, worker="b" * 32) == [(KEY, pytest.approx(ONE))]
    assert book.send(3, {KEY: times(6)}) == [(KEY, pytest.approx(ONE))]


def test_models_of_a_worker_are_apart():
    book = Book()
    assert book.send(2, {KEY: ONE})
    assert book.send(2, {KEY: times(9)}, model="other") == []


def test_another_caller_cannot_speak_for_a_worker():
    book = Book()
    with pytest.raises(InvalidInput, match="another caller") as raised:
        book.send(2, {KEY: ONE}, sender="two")
    assert raised.value.reason == "BAD_REPORT"
    assert book.send(2, {KEY: ONE}) == [(KEY, ONE)]


@pytest.mark.parametrize(
    "wrong",
    [
        ONE._replace(seconds=math.nan),
        ONE._replace(weighted_log=math.inf),
        ONE._replace(seconds=-1.0),
        ONE._replace(num_tokens=-40),
        ONE._replace(num_tokens=1e300),
        ONE._replace(weighted_log=-1e9),  # no such speed
        ONE._replace(weight=1e6),  # more than its tokens
        ONE._replace(num_passes=41),  # more passes than tokens
        ONE._replace(num_requests=30),  # more answers than passes
        ONE._replace(seconds=0.0),
        ONE._replace(seconds=1e7),  # more than there was time for
        ONE._replace(full_seconds=1e6),
        NOTHING._replace(num_requests=1),
    ],
)
def test_sums_that_no_answers_have_are_refused_and_change_nothing(wrong):
    book = Book()
    assert book.send(2, {KEY: times(1)})
    total = Served._make(one + more for one, more in zip(times(1), wrong, strict=True))
    for sums in ({KEY: total}, {ServedKey("latest", 9, 0): wrong}):
        with pytest.raises(InvalidInput) as raised:
            book.send(3, sums)
        assert raised.value.reason == "BAD_REPORT"
    assert book.send(3, {KEY: times(2)}) == [(KEY, pytest.approx(ONE))]


def test_sums_that_fall_are_refused():
    book = Book()
    assert book.send(2, {KEY: times(5)})
    with pytest.raises(InvalidInput):
        book.send(3, {KEY: times(4)})
    assert book.send(4, {KEY: times(6)}) == [(KEY, pytest.approx(ONE))]


@pytest.mark.parametrize(
    "change",
    [
        {"worker": ""},
        {"worker": "x" * 65},
        {"worker": "a/../../etc/passwd"},
        {"model": "../x"},
        {"sequence": 0},
        {"sequence": -1},
        {"sequence": 2**62},
        {"sums": {ServedKey("no alias", 3, 0): ONE}},
        {"sums": {ServedKey("latest", -3, 0): ONE}},
        {"sums": {ServedKey("latest", 2**60, 0): ONE}},
        {"sums": {ServedKey("latest", 3, 17): ONE}},
        {"sums": {ServedKey("latest", version, 0): ONE for version in range(MAX_SERVED + 1)}},
    ],
)
def test_reports_out_of_bounds_are_refused(change):
    book = Book()
    arguments = {"sequence": 2, "sums": {KEY: ONE}, **change}
    with pytest.raises(InvalidInput):
        book.send(**arguments)


def test_an_hour_without_reports_is_in_the_next_one():
    book = Book()
    book.now_s += 3600.0
    assert book.send(2, {KEY: times(3000)}) == [(KEY, times(3000))]


def test_workers_that_are_kept_are_bounded():
    book = Book()
    for number in range(MAX_WORKERS):
        book.send(1, {}, worker=f"{number:032}")
    assert len(book._workers) == MAX_WORKERS
    assert book.send(2, {KEY: ONE}) == []  # forgotten: it begins anew
