import math
from dataclasses import dataclass

import pytest

from shared.engine.scheduler import Scheduler, SchedulerLimits
from shared.errors import Exhausted


@dataclass(eq=False)
class Request:
    name: str
    num_prompt_tokens: int = 10
    num_kv_tokens: int = 10
    deadline_s: float = math.inf
    is_cancelled: bool = False
    is_paused: bool = False
    priority: int = 0
    may_be_put_back: bool = True
    client: str = ""
    on_behalf_of: str = ""
    turn: float = 0.0

    def __repr__(self) -> str:
        return self.name


def scheduler(
    *, max_running: int = 2, max_queue: int = 4, max_queue_tokens: int = 1000, budget: int = 100
) -> Scheduler[Request]:
    return Scheduler(SchedulerLimits(max_running, max_queue, max_queue_tokens, budget))


def filled(scheduler: Scheduler[Request], *requests: Request) -> Scheduler[Request]:
    for request in requests:
        scheduler.add(request)
    return scheduler


def names(requests: list[Request]) -> str:
    return "".join(request.name for request in requests)


def test_requests_are_admitted_in_the_order_in_which_they_came():
    queue = filled(scheduler(), Request("a"), Request("b"), Request("c"))
    assert names(queue.admit()) == "ab"
    assert names(queue.runnable) == "ab"
    assert (queue.num_running, queue.num_waiting) == (2, 1)


def test_clients_take_turns_and_each_keeps_its_order():
    queue = filled(scheduler(max_running=1, max_queue=9), *(Request(f"a{number}", client="a") for number in range(4)))
    order = [queue.admit()[0]]
    filled(queue, Request("b0", client="b"), Request("b1", client="b"), Request("c0", client="c", priority=-1))
    while queue.num_running:
        queue.remove(order[-1])
        filled(queue, *[Request("a4", client="a")] * (len(order) == 1))
        order += queue.admit()
    assert names(order) == "a0c0b0a1b1a2a3a4"


def test_those_behind_one_client_take_turns_among_its_own():
    def a(name: str) -> Request:
        return Request(name, client="a", on_behalf_of=name[0])

    queue = filled(scheduler(max_running=1, max_queue=12), *(a(f"x{number}") for number in range(5)))
    order = [queue.admit()[0]]
    filled(queue, Request("b0", client="b"), a("y0"), a("y1"), Request("b1", client="b"), a("z0"))
    while queue.num_running:
        queue.remove(order[-1])
        order += queue.admit()
    # Every second place is b's while it waits, whatever a says: the names behind a divide a's.
    assert names(order) == "x0b0y0b1z0x1y1x2x3x4"


def test_who_has_nothing_running_gets_a_place_of_one_who_has_several():
    heavy = [Request(f"h{number}", client="h") for number in range(3)]
    queue = filled(scheduler(max_running=2), *heavy)
    assert names(queue.admit()) == "h0h1"
    assert not queue.put_back(), "they are its own"
    filled(queue, Request("a", client="a"), Request("b", client="b"))
    assert queue.has_work(0.0)
    assert names(queue.put_back()) == "h1"
    assert names(queue.admit()) == "a"
    assert not queue.put_back(), "everybody who runs has one place"
    queue.remove(queue.running[-1])
    # Who was put back comes after those who wait for their first turn, and before what comes later.
    filled(queue, Request("c", client="c"))
    assert names(list(queue)[1:]) == "bch1h2"


def test_a_place_is_divided_behind_one_client_too_and_not_for_ever():
    stubborn = [Request(f"x{number}", client="g", on_behalf_of="x", may_be_put_back=number < 1) for number in range(2)]
    queue = filled(scheduler(max_running=2), *stubborn)
    queue.admit()
    filled(queue, Request("y", client="g", on_behalf_of="y", num_kv_tokens=20))
    assert names(queue.put_back()) == "x0"
    queue.admit()
    filled(queue, Request("z", client="g", on_behalf_of="z"))
    assert not queue.put_back()


def test_nobody_overtakes_for_ever():
    """Clients who ask one thing after the other do not keep the later requests of another one waiting."""
    queue = filled(scheduler(max_running=1, max_queue=9), *(Request(f"a{number}", client="a") for number in range(3)))
    filled(queue, *(Request(name, client=name) for name in "bcd"))
    order = [*queue.admit()]
    while len(order) < 12:
        queue.remove(order[-1])
        if order[-1].client != "a":
            filled(queue, Request(order[-1].name, client=order[-1].client))
        order += queue.admit()
    assert names(order) == "a0bcda1bcda2bcd"[: len(names(order))]
    assert "a2" in names(order)


def test_new_clients_do_not_overtake_for_ever():
    queue = filled(scheduler(max_running=1, max_queue=9), *(Request(f"a{number}", client="a") for number in range(3)))
    order = [*queue.admit()]
    for number in range(9):
        filled(queue, Request(f"n{number}", client=f"new {number}"))
        queue.remove(order[-1])
        order += queue.admit()
    assert "a1" in names(order)
    assert "a2" in names(order)
    assert names(order[:2]) == "a0n0"


def test_requests_that_are_cancelled_count_no_turns():
    waiting = [Request(f"a{number}", client="a") for number in range(5)]
    queue = filled(
        scheduler(max_running=1, max_queue=9), *waiting, Request("b0", client="b"), Request("b1", client="b")
    )
    queue.admit()
    for request in waiting[1:]:
        queue.remove(request)
    filled(queue, Request("a9", client="a"))
    assert names(list(queue)[1:]) == "b0a9b1"


def test_what_was_put_back_stays_before_others_of_its_client():
    low = Request("l", client="a", on_behalf_of="x", priority=5)
    queue = filled(scheduler(max_running=1), low)
    queue.admit()
    filled(queue, Request("u", client="b"))
    assert names(queue.put_back()) == "l"
    queue.admit()
    filled(queue, Request("m", client="a", on_behalf_of="y", priority=5))
    assert names(list(queue)) == "ulm"


def test_a_request_that_ends_makes_room_for_the_next():
    first, second, third = Request("a"), Request("b"), Request("c")
    queue = filled(scheduler(), first, second, third)
    queue.admit()
    queue.remove(first)
    assert names(queue.admit()) == "c"
    assert names(queue.runnable) == "bc"


def test_requests_that_go_on_after_a_pause_take_turns():
    requests = [Request(name) for name in "abcde"]
    queue = filled(scheduler(max_queue=5), *requests)
    for request in requests:
        queue.admit()
        request.is_paused = True
    assert names(queue.next_turn()) == ""
    for request in requests:
        request.is_paused = False
    assert [names(queue.next_turn()) for _ in range(5)] == ["ab", "cd", "ea", "bc", "de"]
    requests[1].is_paused = True
    queue.remove(requests[0])
    assert [names(queue.next_turn()) for _ in range(3)] == ["cd", "ec", "de"]
    queue.remove(requests[2])
    assert [names(queue.next_turn()) for _ in range(2)] == ["de", "de"], "nobody is left out"


def test_a_large_request_is_not_overtaken_by_small_ones_behind_it():
    running, large, small = (Request("a", num_kv_tokens=60), Request("b", num_kv_tokens=50), Request("c"))
    queue = filled(scheduler(max_running=9), running, large, small)
    assert names(queue.admit()) == "a"
    queue.remove(running)
    assert names(queue.admit()) == "bc"


def test_the_budget_of_keys_and_values_may_be_used_up_but_not_exceeded():
    queue = filled(scheduler(max_running=9, budget=20), Request("a"), Request("b"), Request("c", num_kv_tokens=1))
    assert names(queue.admit()) == "ab"
    assert queue.num_free_kv_tokens == 0


def test_a_paused_request_keeps_its_memory_but_not_its_place():
    paused, other = Request("a", num_kv_tokens=90), Request("b")
    queue = filled(scheduler(max_running=1), paused, other, Request("c", num_kv_tokens=11))
    queue.admit()
    paused.is_paused = True
    assert names(queue.admit()) == "b"
    assert names(queue.runnable) == "b"
    assert queue.num_kv_tokens == 100
    queue.remove(other)
    assert not queue.can_admit


def test_a_full_queue_refuses_and_names_the_reason():
    queue = filled(scheduler(max_queue=1), Request("a"))
    with pytest.raises(Exhausted) as refused:
        queue.add(Request("b"))
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after_s
    assert queue.num_waiting == 1


def test_prompts_that_wait_are_bounded_by_their_tokens_but_one_alone_may_be_longer():
    queue = scheduler(max_queue_tokens=15)
    queue.add(Request("a", num_prompt_tokens=99))
    with pytest.raises(Exhausted):
        queue.add(Request("b", num_prompt_tokens=1))
    queue = filled(scheduler(max_queue_tokens=15), Request("a", num_prompt_tokens=10))
    queue.add(Request("b", num_prompt_tokens=5))
    with pytest.raises(Exhausted):
        queue.add(Request("c", num_prompt_tokens=1))


def test_cancelled_and_late_requests_are_removed_whether_they_wait_or_run():
    late, fine, waiting = Request("a", deadline_s=5.0), Request("b"), Request("c")
    queue = filled(scheduler(), late, fine, waiting)
    queue.admit()
    assert queue.remove_ended(4.9) == []
    waiting.is_cancelled = True
    assert names(queue.remove_ended(5.0)) == "ac"
    assert list(queue) == [fine]


def test_removing_a_request_twice_is_harmless():
    request = Request("a")
    queue = filled(scheduler(), request)
    queue.remove(request)
    queue.remove(request)
    assert list(queue) == []


def test_there_is_work_when_a_step_would_change_something():
    queue = scheduler(max_running=1)
    assert not queue.has_work(0.0)
    first = Request("a", deadline_s=7.0)
    filled(queue, first, Request("b", deadline_s=9.0))
    assert queue.has_work(0.0)
    queue.admit()
    first.is_paused = True
    assert queue.has_work(0.0)  # the second may run now
    queue.admit()
    list(queue)[1].is_paused = True
    assert not queue.has_work(0.0)
    assert queue.next_deadline_s == 7.0
    assert queue.has_work(7.0)


def test_clear_returns_everything():
    queue = filled(scheduler(), Request("a"), Request("b"), Request("c"))
    queue.admit()
    assert names(queue.clear()) == "abc"
    assert list(queue) == []
    assert queue.next_deadline_s == math.inf


PRIORITIES = {"u": -1, "n": 0, "l": 1, "k": 1, "m": 2}


def low(name: str) -> Request:
    return Request(name, priority=1)


def test_requests_of_low_priority_start_only_while_no_other_waits():
    queue = filled(scheduler(), low("x"), Request("a"), low("y"), Request("b"))
    assert names(queue.admit()) == "ab"
    queue.remove(next(iter(queue)))
    queue.add(Request("c"))
    assert names(queue.admit()) == "c"
    for request in queue.running:
        queue.remove(request)
    assert names(queue.admit()) == "xy"


def test_requests_of_low_priority_take_no_place_in_the_queue_from_others():
    queue = filled(scheduler(max_running=0, max_queue=2), low("x"), low("y"))
    with pytest.raises(Exhausted):
        queue.add(low("z"))
    filled(queue, Request("a"), Request("b"))
    for late in (Request("c"), low("z")):
        with pytest.raises(Exhausted):
            queue.add(late)
    assert names(list(queue)) == "abxy"


@pytest.mark.parametrize(
    ("running", "size", "put_back"),
    [
        ("llll", 30, "l3"),
        ("llll", 50, "l3l2"),  # 20 of 100 are free, and each of them has 20: the last to start go first
        ("llll", 20, ""),  # it fits
        ("llll", 100, "l3l2l1l0"),
        ("nlnl", 30, "l3"),
        ("nlnl", 70, ""),  # both would not be enough, so none loses anything
        ("nnnn", 30, ""),
        ("nlnk", 30, "l1"),  # one that has been put back often enough stays
        ("lmll", 30, "m1"),  # the least urgent first
        ("mlml", 90, "m2m0l3l1"),
        ("uuul", 70, ""),  # those that are as urgent or more stay
    ],
)
def test_requests_of_low_priority_make_room_for_others(running, size, put_back):
    requests = [
        Request(f"{kind}{n}", num_kv_tokens=20, priority=PRIORITIES[kind], may_be_put_back=kind != "k")
        for n, kind in enumerate(running)
    ]
    queue = scheduler(max_running=9, max_queue=9)
    for request in requests:
        filled(queue, request).admit()
    waits = low("x")
    filled(queue, waits, Request("big", num_kv_tokens=size), Request("last"))
    if size > 20:
        assert not queue.can_admit
    for request in requests:  # whose clients have stopped reading: nothing else wakes the loop
        request.is_paused = True
    assert queue.has_work(0.0) == (bool(put_back) or queue.can_admit)
    assert names(queue.put_back()) == put_back
    if put_back:
        assert names(queue.admit())[:3] == "big"
    if put_back and "m" not in running:
        assert list(queue)[-1] is waits, "those that ran wait before those that did not"


def test_requests_of_low_priority_give_up_their_places():
    first, second, other = low("a"), low("b"), Request("c")
    queue = filled(scheduler(), first, second)
    queue.admit()
    filled(queue, other)
    assert names(queue.put_back()) == "b"
    assert names(queue.admit()) == "c"
    assert names(queue.runnable) == "ac"
    queue.remove(other)
    assert names(queue.put_back()) == ""
    assert names(queue.admit()) == "b"


def test_a_paused_request_gives_up_memory_and_no_place():
    paused = Request("p", priority=1, is_paused=True, num_kv_tokens=50)
    queue = filled(scheduler(max_running=1), paused, Request("n", num_kv_tokens=40))
    queue.admit()
    filled(queue, Request("m"))
    queue.admit()
    assert names(queue.put_back()) == "", "its place is taken by one that is no less urgent"


def test_the_lowest_number_comes_first_and_of_equal_ones_the_first_that_came():
    asked = [Request(name, priority=number) for name, number in zip("abcdef", (1, 0, -5, 1, 0, -5), strict=True)]
    queue = filled(scheduler(max_queue=9, max_running=9), *asked)
    assert names(queue.admit()) == "cfbead"


def test_what_is_put_back_waits_before_others_of_its_priority_alone():
    running = [Request("x", priority=2), Request("y", priority=1)]
    queue = filled(scheduler(max_queue=9), *running)
    queue.admit()
    filled(queue, Request("v", priority=2), Request("w", priority=1))
    filled(queue, Request("a"), Request("b"))
    assert names(queue.put_back()) == "x"
    assert names(queue.admit()) == "a"
    assert names(queue.put_back()) == "y"
    assert names(queue.admit()) == "b"
    assert names(list(queue)) == "abywxv"
