"""Recorded passes over paged KV compute what the model itself computes, for every family, alone and in ragged
batches."""

from functools import partial

import pytest
import torch
from transformers import masking_utils

from shared.errors import UnsupportedModel
from shared.model.contiguous_runner import GatedModel
from shared.model.paged_runner import BUCKETS, PagedRunner
from shared.model.ragged import RaggedSequence
from shared.model.recorder import NoRecorder
from shared.model.runner import captured_depths
from shared.model.substitution import paged_attention
from shared.ops import NO_TOKEN
from tests.device_waits import Reads
from tests.paged import NOT_PAGED, PAGED, load_family, make_runner
from tests.passes import TOLERANCE, check_taps, distance, own_logits, random_ids
from tests.recorders import NotRecordable, TracingRecorder
from tests.tiers import tiered

# Experts are multiplied group by group, and the tokens in a group depend on all tokens of the pass.
INEXACT = {"mixtral", "qwen3-moe", "phimoe-longrope", "gpt-oss-sliding", "gemma4-experts"}
SPLIT = 2


@pytest.fixture(scope="module", params=tiered(PAGED, {"llama", "mixtral", "gemma3-sliding"}))
def runner(request: pytest.FixtureRequest) -> PagedRunner:
    return make_runner(load_family(request.param))


@pytest.fixture
def llama() -> PagedRunner:
    return make_runner(load_family("llama"))


def test_pieces_splits_and_rollback_give_the_models_own_logits(runner):
    """A sequence longer than every window, in pieces of many sizes.
    Each piece is first run with wrong tokens and rolled back."""
    ids = random_ids(60)
    expected = own_logits(runner.loaded, ids)
    cache, depth = runner.new_cache(60), runner.num_layers
    start = 0
    for size in (9, 1, 5, 20, 3, 1, 21):
        span = slice(start, start + size)
        run = partial(runner.run, read_length=60)
        run(random_ids(size), cache, first=0, last=depth, base=start)
        shallow = [run(ids[:, at : at + 1], cache, first=0, last=SPLIT, base=at) for at in range(start, start + size)]
        hidden = torch.cat(shallow, 1)
        deep = run(ids[:, span], cache, first=SPLIT, last=depth, base=start, hidden=hidden)
        assert distance(runner.logits(deep), expected[:, span]) < TOLERANCE
        start += size
    own = GatedModel(runner.loaded).capture(ids, [0])[0]
    assert distance(runner.embed(ids, base=0), own) < 1e-6


def test_company_changes_no_bit_up_to_the_smallest_bucket(request, runner):
    held, new = (37, 1, 9), (1, 6, 3)
    ids = [random_ids(h + n) for h, n in zip(held, new, strict=True)]
    depth = runner.num_layers
    alone, together = ([runner.new_cache(40) for _ in ids] for _ in range(2))
    for caches in (alone, together):
        for tokens, cache, length in zip(ids, caches, held, strict=True):
            runner.run(tokens[:, :length], cache, first=0, last=depth, base=0)
    expected = torch.cat(
        [
            runner.run(tokens[:, length:], cache, first=0, last=depth, base=length)
            for tokens, cache, length in zip(ids, alone, held, strict=True)
        ],
        1,
    )
    sequences = [RaggedSequence(c, h, n) for c, h, n in zip(together, held, new, strict=True)]
    fresh = torch.cat([tokens[:, h:] for tokens, h in zip(ids, held, strict=True)], 1)
    shallow = runner.run_ragged(fresh, sequences, first=0, last=SPLIT)
    deep = runner.run_ragged(fresh, sequences, first=SPLIT, last=depth, hidden=shallow)
    if request.node.callspec.params["runner"] in INEXACT:
        assert distance(deep, expected) < TOLERANCE
        return
    assert torch.equal(deep, expected)
    assert torch.equal(runner.logits(deep)[0, :1], runner.logits(expected[:, :1])[0])


def test_a_pass_after_a_larger_one_writes_only_its_own_positions(llama):
    """The padding of a bucket must not write the tokens of the pass before it."""
    ids, other = random_ids(14), random_ids(2)
    caches = [llama.new_cache(16), llama.new_cache(16)]
    llama.run(ids, caches[0], first=0, last=llama.num_layers, base=0)
    held = [store[list(caches[0].blocks)].clone() for store in llama.pool.keys]
    llama.run(other, caches[1], first=0, last=llama.num_layers, base=0)
    for store, before in zip(llama.pool.keys, held, strict=True):
        assert torch.equal(store[list(caches[0].blocks)], before)


def test_passes_beyond_the_largest_bucket_go_piece_by_piece():
    runner = make_runner(load_family("opt"))  # state at depth 0 is more than a row of the embedding
    lengths = (100, 90, 125)
    ids = [random_ids(length) for length in lengths]
    assert sum(lengths) > BUCKETS[-1]
    sequences = [RaggedSequence(runner.new_cache(length), 0, length) for length in lengths]
    states = runner.run_ragged(torch.cat(ids, 1), sequences, first=0, last=runner.num_layers)
    counted = runner.counters.layer_executions, runner.counters.token_layers
    expected = torch.cat([own_logits(runner.loaded, tokens) for tokens in ids], 1)
    assert distance(runner.logits(states), expected) < TOLERANCE
    assert counted == (2 * runner.num_layers, sum(lengths) * runner.num_layers)


def test_counters_count_what_the_replays_ran():
    recorder = TracingRecorder()
    runner = make_runner(load_family("llama"), recorder=recorder)
    cache, ids = runner.new_cache(32), random_ids(7)
    recorder.executed.clear()
    shallow = runner.run(ids, cache, first=0, last=SPLIT, base=0)
    runner.run(ids, cache, first=SPLIT, last=runner.num_layers, base=0, hidden=shallow)
    runner.run(ids[:, :3], cache, first=0, last=1, base=7)
    layers = runner.num_layers
    assert recorder.executed["paged_attention"] == layers + 1
    assert runner.counters.token_layers == 7 * layers + 3
    assert runner.counters.per_layer == [2] + [1] * (layers - 1)


def test_what_was_prepared_is_not_recorded_again():
    recorder = TracingRecorder()
    runner = make_runner(load_family("opt"), recorder=recorder)
    for _ in runner.prepare((0, SPLIT)):
        pass
    prepared = recorder.num_recorded
    cache = runner.new_cache(64)
    hidden = runner.run(random_ids(3), cache, first=0, last=SPLIT, base=0)
    runner.run(random_ids(3), cache, first=SPLIT, last=runner.num_layers, base=0, hidden=hidden)
    runner.logits(runner.run(random_ids(60), cache, first=0, last=runner.num_layers, base=0))
    runner.embed(random_ids(1), base=5)
    assert recorder.num_recorded == prepared


@pytest.mark.parametrize("family", tiered(["llama", "gemma3-sliding"], {"llama"}))
def test_half_precision_stays_near_the_models_own(family):
    runner = make_runner(load_family(family, torch.bfloat16))
    ids = random_ids(30)
    cache = runner.new_cache(30)
    states = [
        runner.run(ids[:, at : at + 6], cache, first=0, last=runner.num_layers, base=at) for at in range(0, 30, 6)
    ]
    logits = runner.logits(torch.cat(states, 1))
    assert logits.dtype == torch.float32
    assert distance(logits, own_logits(runner.loaded, ids)) < 0.1


@pytest.mark.parametrize("family", sorted(NOT_PAGED))
def test_attention_that_cannot_be_reached_is_refused(family):
    loaded = load_family(family)
    with pytest.raises(UnsupportedModel, match="paged attention") as refused:
        make_runner(loaded)
    assert refused.value.reason == "PAGES_NOT_SUPPORTED"


def test_a_window_of_another_kind_is_refused(monkeypatch):
    """Chunks and windows have a size each, and give the same mask for sequences that are not longer."""
    loaded = load_family("mistral-sliding")
    loaded.model.config.sliding_window = 400
    make_runner(loaded)

    def chunks(window: int):
        return lambda batch, head, q, kv: (kv <= q) & (kv // window == q // window)

    monkeypatch.setattr(masking_utils, "sliding_window_causal_mask_function", chunks)
    with pytest.raises(UnsupportedModel, match="causal masks and sliding windows only"):
        make_runner(loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_states_are_refused(monkeypatch, dtype):
    monkeypatch.setattr(paged_attention.PagedMask, "for_layer", lambda mask, layer: paged_attention.PagedMask(6, layer))
    with pytest.raises(UnsupportedModel, match="states differ"):
        make_runner(load_family("mistral-sliding", dtype))


def test_a_model_that_waits_for_the_device_is_served_unrecorded(caplog):
    loaded = load_family("llama")
    mlp = loaded.parts.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) if x.abs().sum().item() >= 0 else x
    runner = PagedRunner(loaded, kv_budget_bytes=1 << 20, recorder=TracingRecorder())
    assert not runner.records
    assert "wait for the device: aten._local_scalar_dense" in caplog.text
    ids = random_ids(5)
    states = runner.run(ids, runner.new_cache(5), first=0, last=runner.num_layers, base=0)
    assert distance(runner.logits(states), own_logits(runner.loaded, ids)) < TOLERANCE


def test_unrecorded_passes_are_the_recorded_ones(llama):
    plain = make_runner(llama.loaded, recorder=NoRecorder())
    ids = random_ids(20)
    states = [r.run(ids, r.new_cache(20), first=0, last=r.num_layers, base=0) for r in (llama, plain)]
    assert torch.equal(*states)


@pytest.mark.parametrize("num_good", tiered([0, 2], {2}))
def test_recording_that_fails_half_way_leaves_nothing_recorded(llama, num_good):
    class Failing(TracingRecorder):
        def record(self, work):
            if self.num_recorded == num_good:
                raise NotRecordable("the driver is out of memory")
            return super().record(work)

    recorder = Failing()
    runner = PagedRunner(llama.loaded, kv_budget_bytes=1 << 20, recorder=recorder)
    assert not runner.records
    assert recorder.is_closed
    ids = random_ids(5)
    states, own = (r.run(ids, r.new_cache(20), first=0, last=r.num_layers, base=0) for r in (runner, llama))
    torch.testing.assert_close(states, own, rtol=1e-4, atol=1e-4)


def test_taps_are_the_models_own_states(runner):
    """In one pass, in pieces that are split at any depth, and in more than one bucket."""
    ids = random_ids(60)
    check_taps(runner, ids, runner._model.capture(ids, captured_depths(runner.num_layers)))


def test_choices_are_those_of_the_logits(runner):
    """In any number of rows, also where a row has none; without waiting for the device."""
    generator = torch.Generator().manual_seed(0)
    num_rows = min(300, 5 * runner.head_sizes[-1])
    states = torch.randn(num_rows, runner.loaded.hidden_size, generator=generator)
    states[1] = float("nan")
    for count in (1, 2, 17, num_rows):
        logits, reads = runner.logits(states[:count]), Reads()
        with reads:
            chosen = runner.choices(states[:count])
        expected = logits.argmax(-1)
        expected[1:2] = NO_TOKEN
        assert chosen.tolist() == expected.tolist()
        assert not reads.found
