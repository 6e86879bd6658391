"""Fused layers that the model calls alike run as one op, with the bits of layers that run one by one."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.model.cache_argument import with_cache
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.ragged import RaggedSequence
from shared.model.runner import CapturedStates, captured_depths
from shared.model.substitution import plan as plan_module
from shared.ops.layer import LayerWeights
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, build_family
from tests.tiers import tiered


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each op, how many layers it ran."""
    spans: list[int] = []
    op = plan_module.decoder_layers

    def noted(*args: Any, weights: LayerWeights, **kwargs: Any) -> Tensor:
        spans.append(weights.num_layers)
        return op(*args, weights=weights, **kwargs)

    monkeypatch.setattr(plan_module, "decoder_layers", noted)
    return spans


def _loaded(family: str = "llama") -> LoadedModel:
    torch.manual_seed(3)
    return wrap_model(build_family(family), accelerate=True)


def _one_by_one(loaded: LoadedModel) -> None:
    """A hook that does nothing on each layer: with hooks, layers run one by one."""
    for layer in loaded.parts.layers:
        layer.register_forward_hook(lambda *_: None)


def _run(runner: ContiguousRunner, ids: Tensor, depths: list[int]) -> list[Tensor]:
    cache, states, hidden = runner.new_cache(ids.shape[1]), [], None
    for first, last in pairwise(depths):
        hidden = runner.run(ids, cache, first=first, last=last, base=0, hidden=hidden)
        states.append(hidden)
    return states


# Layers of the last three are of two kinds: they get different masks, those of Gemma also different angles.
@pytest.mark.parametrize(
    "family",
    tiered(
        ["llama", "qwen3", "mistral-sliding", "qwen2-sliding", "gpt-oss-sliding", "gemma3-sliding"],
        {"mistral-sliding", "gemma3-sliding"},
    ),
)
@pytest.mark.parametrize("depths", [[0, NUM_LAYERS], [0, 2, NUM_LAYERS]])
def test_a_pass_is_one_op_with_the_bits_of_single_layers(family, depths, spans):
    ids = torch.randint(2, VOCABULARY_SIZE, (1, 7))
    runner = ContiguousRunner(_loaded(family))
    del spans[:]
    stacked = _run(runner, ids, depths)
    assert spans == [last - first for first, last in pairwise(depths)]
    runner.counters.reset()
    _run(runner, ids, depths)
    assert runner.counters.per_layer == [1] * NUM_LAYERS
    assert runner.counters.token_layers == 7 * NUM_LAYERS
    loaded = _loaded(family)
    alone = ContiguousRunner(loaded)
    _one_by_one(loaded)
    del spans[:]
    assert all(map(torch.equal, stacked, _run(alone, ids, depths)))
    assert spans == [1] * NUM_LAYERS


@pytest.mark.parametrize("family", ["llama", "gemma3-sliding"])
def test_several_sequences_share_the_op(family, spans):
    """One of them is longer than a window."""
    ids = torch.randint(2, VOCABULARY_SIZE, (1, 9))
    states = []
    for hooked in (False, True):
        loaded = _loaded(family)
        runner = ContiguousRunner(loaded)
        if hooked:
            _one_by_one(loaded)
        caches = [runner.new_cache(9) for _ in range(2)]
        parts = [RaggedSequence(caches[0], 0, 2), RaggedSequence(caches[1], 0, 7)]
        del spans[:]
        states.append(runner.run_ragged(ids, parts, first=0, last=NUM_LAYERS))
        assert spans == ([1] * NUM_LAYERS if hooked else [NUM_LAYERS])
    assert torch.equal(*states)


def test_states_are_captured_where_they_are_wanted(spans):
    ids = torch.randint(2, VOCABULARY_SIZE, (1, 6))
    runner = ContiguousRunner(_loaded())
    expected = {depth: _run(runner, ids, [0, depth])[0] for depth in (1, 3, NUM_LAYERS)}
    del spans[:]
    cache = runner.new_cache(6)
    cache.begin(0, 6)
    with torch.inference_mode():
        captured = runner.gates.capture([1, 3, NUM_LAYERS], input_ids=ids, cache=cache)
    assert spans == [1, 2, NUM_LAYERS - 3]
    assert captured.keys() == expected.keys()
    assert all(torch.equal(captured[depth], expected[depth]) for depth in expected)


def test_a_tapped_pass_is_one_op(spans):
    ids = torch.randint(2, VOCABULARY_SIZE, (1, 6))
    runner = ContiguousRunner(_loaded())
    wanted = captured_depths(NUM_LAYERS)
    expected = {depth: _run(runner, ids, [0, depth])[0] for depth in (*wanted, NUM_LAYERS)}
    captured: CapturedStates = {}
    del spans[:]
    out = runner.run(ids, runner.new_cache(6), first=0, last=NUM_LAYERS, base=0, captured=captured)
    assert spans == [NUM_LAYERS]
    assert captured.keys() == set(wanted)
    assert all(torch.equal(state, expected[depth]) for depth, state in captured.items())
    assert torch.equal(out, expected[NUM_LAYERS])


def test_layers_that_are_called_differently_run_one_by_one(spans, monkeypatch):
    """Nothing in the configuration tells that this model gives each layer rotary tables of its own."""
    states = []
    for hooked in (False, True):
        loaded = _loaded()
        runner = ContiguousRunner(loaded)
        runner.direct = None  # it was found before the model is changed below
        if hooked:
            _one_by_one(loaded)
        for index, layer in enumerate(loaded.parts.layers):
            gate = layer.forward

            def own_tables(*args: Any, gate=gate, index=index, **kwargs: Any) -> Any:
                cos, sin = kwargs["position_embeddings"]
                return gate(*args, **{**kwargs, "position_embeddings": (cos * (1 + index), sin)})

            monkeypatch.setattr(layer, "forward", own_tables)
        ids = torch.randint(2, VOCABULARY_SIZE, (1, 6), generator=torch.Generator().manual_seed(1))
        runner.counters.reset()
        states += _run(runner, ids, [0, NUM_LAYERS])
        assert runner.counters.per_layer == [1] * NUM_LAYERS
        del spans[:]
        states += _run(runner, ids, [0, NUM_LAYERS])
        assert spans == [1] * NUM_LAYERS
        assert ContiguousRunner(loaded).direct is None
    assert all(torch.equal(states[0], other) for other in states[1:])


def test_the_model_can_still_be_called_directly(spans):
    loaded = _loaded()
    runner = ContiguousRunner(loaded)
    ids = torch.randint(2, VOCABULARY_SIZE, (1, 6))
    expected, model = _run(runner, ids, [0, NUM_LAYERS])[0], loaded.model.base_model
    for _ in range(2):
        cache = runner.new_cache(6)
        cache.begin(0, 6)
        with torch.inference_mode():
            states = model(input_ids=ids, **with_cache(model, cache))
        assert torch.equal(states.last_hidden_state, loaded.parts.final_norm(expected))
