"""Walks from exit to exit say what each exit says by itself, whoever decides who goes on."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shared.ladder.ladder import BoundLadder
from shared.ladder.rungs import Draft
from shared.ladder.walk import BUCKETS, Walked, Walker
from shared.model.paged_kv import PagedCache
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import NoRecorder
from tests.families import VOCABULARY_SIZE
from tests.paged import load_family, make_runner
from tests.random_ladder import random_ladder
from tests.recorders import TracingRecorder

DEPTHS = (0, 2, 3)
HELD = 5
RECORDERS = {
    "decided by the host": TracingRecorder,
    "decided by the device": lambda: TracingRecorder(composes=True),
}


@pytest.fixture(params=RECORDERS)
def runner(request: pytest.FixtureRequest) -> PagedRunner:
    torch.manual_seed(0)
    return make_runner(load_family("llama"), 1 << 22, recorder=RECORDERS[request.param]())


def bind(runner: PagedRunner, depths: Sequence[int] = DEPTHS) -> BoundLadder:
    ladder = random_ladder(runner.loaded, 3, depths).bind(runner)
    assert ladder.walk is not None
    return ladder


def sequence(runner: PagedRunner, seed: int) -> PagedCache:
    """HELD tokens are settled."""
    cache = runner.new_cache(HELD + 3)
    assert isinstance(cache, PagedCache)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY_SIZE, (1, HELD), generator=generator)
    runner.run(ids, cache, first=0, last=runner.num_layers, base=0)
    return cache


def walkers(runner: PagedRunner, count: int, seed: int = 0) -> list[Walker]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    levels = (0.0, 0.2, 0.5, 0.8, math.inf)
    return [
        Walker(
            token=draw.randrange(2, VOCABULARY_SIZE),
            cache=sequence(runner, number),
            position=HELD,
            deep_state=torch.randn(runner.loaded.hidden_size),
            offset=draw.randint(1, 4),
            thresholds=(*(draw.choice(levels) for _ in DEPTHS[1:]), 0.0),
        )
        for number in range(count)
    ]


def asked_alone(runner: PagedRunner, ladder: BoundLadder, walker: Walker) -> tuple[list[Draft], Tensor]:  # fmt: skip
    """Exit by exit, each from the embedding on, until one is sure enough."""
    said: list[Draft] = []
    ids = torch.tensor([[walker.token]])
    for index, depth in enumerate(ladder.depths):
        state = runner.embed(ids, walker.position)
        if depth:
            state = runner.run(ids, walker.cache, first=0, last=depth, base=walker.position)
        said += ladder.ask(index, state[0], walker.deep_state[None], [walker.offset])
        if said[-1].probability >= walker.thresholds[index]:
            break
    return said, state[0, 0]


def check(walked: Walked, expected: tuple[list[Draft], Tensor], *, to_the_bit: bool) -> None:
    drafts, state = expected
    if to_the_bit:
        assert list(walked.drafts) == drafts
        assert torch.equal(walked.state, state)
        return
    assert [(d.token, d.depth) for d in walked.drafts] == [(d.token, d.depth) for d in drafts]
    torch.testing.assert_close(walked.state, state)


@pytest.mark.parametrize("count", [1, 3, 16, 17, 40, 70])
def test_a_walk_is_each_exit_asked_alone(runner: PagedRunner, count: int) -> None:
    ladder = bind(runner)
    assert ladder.walk is not None
    going = walkers(runner, count)
    walked = ladder.walk(going)
    expected = [asked_alone(runner, ladder, walker) for walker in going]
    for one, own in zip(walked, expected, strict=True):
        check(one, own, to_the_bit=count <= BUCKETS[0])
    if count > 3:
        assert {len(drafts) for drafts, _ in expected} == {1, 2, 3}


def test_what_a_walk_leaves_behind_is_what_a_pass_would(runner: PagedRunner) -> None:
    """Keys and values of those that left early end where they left; the deeper layers take up from there."""
    ladder = bind(runner)
    assert ladder.walk is not None
    going = walkers(runner, 6)
    for walker, walked in zip(going, ladder.walk(going), strict=True):
        own = sequence(runner, going.index(walker))
        ids = torch.tensor([[walker.token]])
        whole = {"first": 0, "last": runner.num_layers, "base": HELD}
        expected = runner.run(ids, own, **whole)
        hidden = walked.state[None, None] if walked.depth else None
        rest = {**whole, "first": walked.depth}
        assert torch.equal(runner.run(ids, walker.cache, hidden=hidden, **rest), expected)
        after = torch.tensor([[7]])
        again = {"first": 0, "last": runner.num_layers, "base": HELD + 1}
        assert torch.equal(
            runner.run(after, walker.cache, **again), runner.run(after, own, **again)
        )


def test_nobody_elses_pages_are_written(runner: PagedRunner) -> None:
    """Not by padding, and not by recording stages between walks."""
    ladder = bind(runner)
    assert ladder.walk is not None
    other = [sequence(runner, number) for number in range(3)]
    going = walkers(runner, 5)
    page = {number for cache in other for number in cache.pages}
    held = [keys[sorted(page)].clone() for keys in runner.pool.keys]
    ladder.walk(going)
    recording = ladder.prepare()
    next(recording)  # the first stage of more tokens; before the second others walk
    ladder.walk(going)
    for walker in going:  # by now something else stands where they walked
        ids = torch.tensor([[3]])
        runner.run(ids, walker.cache, first=0, last=runner.num_layers, base=HELD)
    before = [keys.clone() for keys in runner.pool.keys]
    for _ in recording:
        pass
    for keys, own, whole in zip(runner.pool.keys, held, before, strict=True):
        assert torch.equal(keys[sorted(page)], own)
        assert torch.equal(keys, whole)


def test_the_host_reads_once_an_exit_or_once_in_all(
    runner: PagedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = bind(runner)
    assert ladder.walk is not None
    one = walkers(runner, 1)[0]
    ladder.walk([one])  # recorded now
    read: list[Tensor] = []
    own = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: read.append(tensor) or own(tensor))
    for thresholds, num_exits in (((0.0,) * 3, 1), ((math.inf, 0.0, 0.0), 2), ((math.inf, math.inf, 0.0), 3)):  # fmt: skip
        read.clear()
        runner.counters.reset()
        [walked] = ladder.walk([Walker(**{**vars(one), "thresholds": thresholds})])
        assert len(walked.drafts) == num_exits
        assert len(read) == (1 if runner.recorder.composes else num_exits)
        assert runner.counters.per_layer[:4] == [int(depth < walked.depth) for depth in range(4)]


def test_layers_behind_an_exit_where_all_left_do_not_run(runner: PagedRunner) -> None:
    ladder = bind(runner)
    assert ladder.walk is not None
    going = [Walker(**{**vars(one), "thresholds": (0.0,) * 3}) for one in walkers(runner, 4)]
    ladder.walk(going)
    recorder = runner.recorder
    assert isinstance(recorder, TracingRecorder)
    recorder.executed.clear()
    ladder.walk(going)
    assert recorder.executed["paged_attention"] == 0
    ladder.walk([Walker(**{**vars(one), "thresholds": (math.inf, 0.0, 0.0)}) for one in going])
    assert recorder.executed["paged_attention"] == 2


def test_where_the_host_decides_stages_shrink_to_those_that_stay() -> None:
    torch.manual_seed(0)
    runner = make_runner(load_family("llama"), 1 << 22)
    ladder = bind(runner)
    assert ladder.walk is not None
    going = [
        Walker(**{**vars(one), "thresholds": (math.inf if number < 3 else 0.0, 0.0, 0.0)})
        for number, one in enumerate(walkers(runner, 40))
    ]
    ladder.walk(going)
    ran: list[tuple[int, int]] = []
    for index, stage in enumerate(ladder.walk._stages):
        for bucket, replay in stage.recordings.items():
            stage.recordings[bucket] = lambda at=(index, bucket), own=replay: (
                ran.append(at) or own()
            )  # type: ignore[misc]
    ladder.walk(going)
    assert ran == [(0, 64), (1, 16)]


def test_unrecorded_it_walks_as_well() -> None:
    torch.manual_seed(0)
    runner = make_runner(load_family("llama"), recorder=NoRecorder())
    ladder = bind(runner)
    assert ladder.walk is not None
    going = walkers(runner, 5)
    for walker, walked in zip(going, ladder.walk(going), strict=True):
        check(walked, asked_alone(runner, ladder, walker), to_the_bit=True)


def test_a_ladder_whose_first_exit_is_at_a_layer(runner: PagedRunner) -> None:
    ladder = bind(runner, (1, 3, 4))
    assert ladder.walk is not None
    going = walkers(runner, 9)
    for walker, walked in zip(going, ladder.walk(going), strict=True):
        check(walked, asked_alone(runner, ladder, walker), to_the_bit=True)
