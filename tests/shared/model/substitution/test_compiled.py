"""A layer compiles as one graph, once per kind of layer and size of pass."""

import gc
from typing import Any

import pytest
import torch

from shared.model.recorder import NoRecorder
from shared.model.runners import LayerCompiler
from tests.paged import load_family, make_runner

pytestmark = pytest.mark.full


class CountingBackend:
    def __init__(self) -> None:
        self.num_compiled = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        self.num_compiled += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Nothing is compiled yet, and no model waits for the garbage collector. An accelerated one puts transformers'
    rotary function back when it is collected, which a compilation that has read the function would take for a
    change."""
    gc.collect()
    torch._dynamo.reset()


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gemma3-sliding", 2), ("gpt2", 1)])
def test_one_compilation_per_kind_of_layer_and_size(family: str, kinds: int) -> None:
    backend = CountingBackend()
    loaded = load_family(family)
    runner = make_runner(loaded, recorder=NoRecorder(), transform=LayerCompiler(backend))
    assert runner.compiles
    before = backend.num_compiled
    plain = make_runner(loaded, recorder=NoRecorder())
    ids = torch.randint(2, 90, (1, 12))
    states = []
    for r in (runner, plain):
        cache, hidden = r.new_cache(12), None
        for layer in range(r.num_layers):
            hidden = r.run(ids, cache, first=layer, last=layer + 1, base=0, hidden=hidden)
        states.append(hidden)
    torch.testing.assert_close(*states)
    assert backend.num_compiled == before  # the check has had all layers at this size
    hidden = runner.run(torch.randint(2, 90, (1, 100)), runner.new_cache(100), first=0, last=2, base=0)
    assert hidden.shape[1] == 100
    assert backend.num_compiled == before + kinds


def test_what_changes_a_cache_in_place_does_so_when_compiled() -> None:
    runner = make_runner(load_family("llama"), recorder=NoRecorder(), transform=LayerCompiler("aot_eager"))
    assert runner.compiles


def test_a_layer_that_needs_its_number_is_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_family("llama")
    kind = type(loaded.parts.layers[0].self_attn.o_proj)
    for index, layer in enumerate(loaded.parts.layers):
        layer.self_attn.o_proj.number = index
    forward = kind.forward

    def numbered(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * (1 + getattr(self, "number", 0))

    monkeypatch.setattr(kind, "forward", numbered)
    backend = CountingBackend()
    runner = make_runner(loaded, recorder=NoRecorder(), transform=LayerCompiler(backend))
    assert runner.compiles
    # A graph that all layers shared would be compiled once or twice.
    # After some other tests each layer is compiled twice.
    assert backend.num_compiled >= runner.num_layers


def test_layers_compiled_in_half_the_width_count_as_the_models_own() -> None:
    """Compiled as a whole, a layer rounds to bfloat16 less often than its modules do.
    The check must accept that difference."""
    loaded = load_family("llama", torch.bfloat16)
    assert make_runner(loaded, recorder=NoRecorder(), transform=LayerCompiler()).compiles
