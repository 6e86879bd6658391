from functools import partial

import pytest
import torch

from shared.errors import InvalidInput, UnsupportedModel
from shared.model.contiguous_runner import ContiguousRunner, GatedModel
from shared.model.loaded import wrap_model
from shared.model.runner import Runner, captured_depths
from shared.ops import NO_TOKEN
from tests.families import FAMILIES, build_family, by_tier
from tests.passes import TOLERANCE, check_taps, distance, own_logits, random_ids

SPLIT = 3


@pytest.fixture(params=by_tier(sorted(FAMILIES)))
def runner(request: pytest.FixtureRequest) -> Runner:
    return ContiguousRunner(wrap_model(build_family(request.param)))


@pytest.fixture
def llama() -> Runner:
    return ContiguousRunner(wrap_model(build_family("llama")))


def test_shallow_one_by_one_then_one_verify_pass_gives_the_full_models_logits(runner):
    ids = random_ids(24)
    expected = own_logits(runner.loaded, ids)
    cache, run = runner.new_cache(32), partial(runner.run, read_length=24)
    state = run(ids[:, :9], cache, first=0, last=runner.num_layers, base=0)
    assert distance(runner.logits(state), expected[:, :9]) < TOLERANCE
    position = 9
    for num_pending in (3, 1, 5, 6):
        shallow = [
            run(ids[:, p : p + 1], cache, first=0, last=SPLIT, base=p) for p in range(position, position + num_pending)
        ]
        span = slice(position, position + num_pending)
        deep = run(
            ids[:, span], cache, first=SPLIT, last=runner.num_layers, base=position, hidden=torch.cat(shallow, 1)
        )
        assert distance(runner.logits(deep), expected[:, span]) < TOLERANCE
        position += num_pending


@pytest.mark.parametrize("family", ["llama", "phi2"])
def test_choices_are_those_of_logits_that_nobody_writes(family, monkeypatch):
    """But for a head that has a bias, as that of Phi 2, or a hook."""
    runner = ContiguousRunner(wrap_model(build_family(family), accelerate=True))
    head, states, written = runner.loaded.parts.head, torch.randn(5, runner.loaded.hidden_size), []
    states[3] = float("nan")
    logits = runner.logits(states)
    expected, opposite = (each.argmax(-1).index_fill_(0, torch.tensor(3), NO_TOKEN) for each in (logits, -logits))
    monkeypatch.setattr(runner, "logits", lambda x: [written.append(x), GatedModel.logits(runner, x)][1])
    assert torch.equal(runner.choices(states), expected)
    assert len(written) == (family == "phi2")
    hook = head.register_forward_hook(lambda head, inputs, logits: -logits)
    assert torch.equal(runner.choices(states), opposite)
    hook.remove()
    assert torch.equal(runner.choices(states), expected)


def test_rollback_leaves_no_trace(runner):
    ids = random_ids(12)
    wrong = random_ids(5)
    cache = runner.new_cache(32)
    full = {"first": 0, "last": runner.num_layers}
    runner.run(ids[:, :8], cache, base=0, **full)
    runner.run(wrong, cache, base=8, **full)
    state = runner.run(ids[:, 8:], cache, base=8, **full)
    expected = own_logits(runner.loaded, ids)[:, 8:]
    assert distance(runner.logits(state), expected) < TOLERANCE


def test_capture_returns_the_state_at_each_depth(runner):
    ids = random_ids(10)
    depths = [0, 2, runner.num_layers]
    states = runner.capture(ids, depths)
    assert sorted(states) == depths
    assert distance(runner.logits(states[runner.num_layers]), own_logits(runner.loaded, ids)) < TOLERANCE
    cache = runner.new_cache(16)
    assert distance(runner.embed(ids[:, 4:], base=4), states[0][:, 4:]) < TOLERANCE
    shallow = runner.run(ids, cache, first=0, last=2, base=0)
    assert distance(shallow, states[2]) < TOLERANCE


def test_taps_are_the_models_own_states(runner):
    ids = random_ids(20)
    check_taps(runner, ids, runner.capture(ids, captured_depths(runner.num_layers)))


def test_counters_count_what_the_layers_really_ran(llama):
    calls: list[int] = []
    for index, layer in enumerate(llama.loaded.parts.layers):
        # A closed gate also calls the layer's __call__. Its attention runs only if the gate is open.
        layer.self_attn.register_forward_hook(lambda *_, index=index: calls.append(index))
    cache = llama.new_cache(16)
    ids = random_ids(7)
    llama.run(ids[:, :4], cache, first=0, last=llama.num_layers, base=0)
    shallow = llama.run(ids[:, 4:], cache, first=0, last=2, base=4)
    llama.run(ids[:, 4:], cache, first=2, last=5, base=4, hidden=shallow)
    assert calls == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert llama.counters.per_layer == [2, 2, 2, 2, 2, 1]
    assert llama.counters.layer_executions == 11
    assert llama.counters.token_layers == 6 * 4 + 5 * 3


def test_a_pass_beyond_the_capacity_is_refused_and_leaves_the_gates_open(llama):
    ids = random_ids(9)
    with pytest.raises(InvalidInput, match="do not fit"):
        llama.run(ids, llama.new_cache(8), first=0, last=2, base=0)
    expected = own_logits(llama.loaded, ids)
    state = llama.run(ids, llama.new_cache(9), first=0, last=llama.num_layers, base=0)
    assert distance(llama.logits(state), expected) < TOLERANCE


def test_two_runners_share_one_models_gates(llama):
    other = ContiguousRunner(llama.loaded)
    ids = random_ids(5)
    state = other.run(ids, other.new_cache(8), first=0, last=other.num_layers, base=0)
    assert distance(other.logits(state), own_logits(llama.loaded, ids)) < TOLERANCE
    assert other.counters is llama.counters


def test_a_model_with_several_states_per_token_is_refused():
    """As hyper-connections have. The gates could not take one of them for the token's state."""
    model = build_family("llama")
    last = model.model.layers[-1]
    own = last.forward
    last.forward = lambda *args, **kwargs: own(*args, **kwargs)[:, :, None]
    with pytest.raises(UnsupportedModel, match=r"has the shape \[1, 32\], not one dimension"):
        ContiguousRunner(wrap_model(model))
