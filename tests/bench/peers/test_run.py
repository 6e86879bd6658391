"""Turns: each contender does a task before any does the next. Which of our rows an engine is compared with."""

from collections.abc import Callable, Sequence

from bench.peers.engines.serving import Answer, EngineSettings
from bench.peers.run import Planned, base_of, first_tokens, groups, take_turns
from bench.peers.worker import EngineFailed


def planned(title: str, weights: str) -> Planned:
    return Planned(title, weights, [], EngineSettings("", weights, 1, 1, 0, (), ""))


def test_others_are_compared_with_the_products_that_they_use() -> None:
    ours = [planned("neap", weights) for weights in ("bfloat16", "bfloat16-products")]
    vllm = planned("vLLM", "bfloat16")
    products = ("neap full bfloat16-products", "neap exact bfloat16-products")
    assert base_of(vllm, [*ours, vllm]) == products
    assert base_of(vllm, [ours[0], vllm]) == ("neap full bfloat16", "neap exact bfloat16")
    assert base_of(planned("vLLM", "float32"), ours) == ("neap full float32", "neap exact float32")


def test_ours_is_compared_with_itself() -> None:
    plain, products = (planned("neap", weights) for weights in ("bfloat16", "bfloat16-products"))
    assert base_of(plain, [plain, products]) == ("neap full bfloat16", "neap exact bfloat16")
    assert base_of(products, [plain, products])[0] == "neap full bfloat16-products"


def test_requests_at_once_have_the_longest_answers() -> None:
    assert groups([5, 64, 64, 9, 64], 2) == [[1, 2], [4, 3]]
    assert groups([5, 64], 3) == [[1, 0, 1]]


def test_contenders_alternate_and_the_first_changes() -> None:
    order: list[tuple[str, int]] = []

    def contender(name: str) -> Callable[[int], int]:
        def run(task: int) -> int:
            order.append((name, task))
            return task * 10

        return run

    results = take_turns({name: contender(name) for name in "abc"}, [1, 2], 2, {})
    assert results == {name: [[10, 20], [10, 20]] for name in "abc"}
    assert [name for name, _ in order] == [*"abc", *"bca", *"bca", *"cab"]
    assert [task for _, task in order] == [1, 1, 1, 2, 2, 2] * 2


def test_first_tokens_are_of_prompts_of_the_lengths_that_are_asked_for() -> None:
    asked, calls = [], 0

    def answering(prompts: Sequence[list[int]]) -> list[Answer]:
        nonlocal calls
        calls += 1
        asked.append(prompts[0])
        return [Answer([1, 1], [float(calls), 99.0])]

    seconds = first_tokens({"one": answering}, [[1, 2], [3]], [2, 5], 3, {}, lambda line: None)
    assert asked == [[1, 2], *[[1, 2], [1, 2, 3, 1, 2]] * 3]
    assert seconds == {"one": [4.0, 5.0]}


def test_a_contender_that_fails_is_left_out_for_good() -> None:
    asked = []

    def failing(task: int) -> int:
        asked.append(task)
        if task == 2:
            raise EngineFailed("out of memory")
        return task

    failures: dict[str, str] = {}
    results = take_turns({"good": lambda task: task, "bad": failing}, [1, 2, 3], 2, failures)
    assert results == {"good": [[1, 2, 3]] * 2}
    assert failures == {"bad": "out of memory"}
    assert asked == [1, 2]
    assert take_turns({"bad": failing}, [1], 1, failures) == {}
