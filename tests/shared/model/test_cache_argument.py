"""Models run alike whatever their forward calls the KV cache.
So one installed version of transformers tests both names."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.errors import UnsupportedModel
from shared.model.cache_argument import CACHE_ARGUMENTS, cache_argument
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.numerics import numerics_of
from shared.model.parts import find_parts
from shared.model.ragged import RaggedSequence
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, build_family


def _named(family: str, name: str) -> PreTrainedModel:
    """A model whose forward, layers and output call the KV cache `name`."""
    model = build_family(family)
    own = cache_argument(model)
    if name != own:
        running: list[nn.Module] = []
        for module in {model, model.base_model}:
            module.__class__ = _renamed_model(type(module), own, name, running)
        for layer in find_parts(model).layers:
            layer.__class__ = _renamed_layer(type(layer), own, name)
    return model


def _renamed_model(kind: type[nn.Module], own: str, name: str, running: list[nn.Module]) -> type[nn.Module]:
    """`running`: the models whose forward runs now. They call each other, and their layers, by their own name."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if own in kwargs and not running:
            raise TypeError(f"{kind.__name__}.forward() got an unexpected argument {own!r}")
        running.append(self)
        try:
            output = kind.forward(self, *args, **_renamed(kwargs, name, own))
        finally:
            running.pop()
        return output if running else _Output(_renamed(output, own, name))

    signature = inspect.signature(kind.forward)
    parameters = [p.replace(name=_other(p.name, own, name)) for p in signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"forward": forward})


def _renamed_layer(kind: type[nn.Module], own: str, name: str) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, *args, **_renamed(kwargs, own, name))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **_renamed(kwargs, name, own))

    return type(kind.__name__, (kind,), {"__call__": call, "forward": forward})


class _Output(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


def _renamed(values: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    return {_other(name, before, after): value for name, value in values.items()}


def _other(name: str, before: str, after: str) -> str:
    return after if name == before else name


def _run(family: str, name: str) -> tuple[ContiguousRunner, list[Tensor]]:
    """The runner, and the states of passes of each kind."""
    loaded = wrap_model(_named(family, name), accelerate=True)
    runner = ContiguousRunner(loaded)
    ids = torch.randint(VOCABULARY_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))
    caches, outputs = [runner.new_cache(12) for _ in range(3)], [runner.embed(ids, 1)]
    for cache in caches:
        outputs.append(runner.run(ids[:, :7], cache, first=0, last=NUM_LAYERS, base=0))
        runner.direct = None
    sequences = [RaggedSequence(cache, 7, count) for cache, count in zip(caches, (3, 2), strict=False)]
    outputs.append(runner.run_ragged(ids[:, 7:], sequences, first=0, last=NUM_LAYERS))
    hidden = runner.run(ids[:, 7:], caches[2], first=0, last=2, base=7)
    outputs.append(runner.run(ids[:, 7:], caches[2], first=2, last=6, base=7, hidden=hidden))
    return runner, outputs


# The first has fused layers, the second runs its own.
@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("family", ["llama", "gemma3-sliding"])
def test_models_run_alike_under_either_name(family: str) -> None:
    runners, outputs = zip(*(_run(family, name) for name in CACHE_ARGUMENTS), strict=True)
    assert all(map(torch.equal, *outputs))
    reports = [runner.loaded.acceleration for runner in runners]
    assert reports[0] == reports[1]
    assert reports[0].layers == NUM_LAYERS
    assert [runner.supports_ragged for runner in runners] == [True, True]
    assert [runner.why_not_direct for runner in runners] == 2 * [runners[0].why_not_direct]
    assert [numerics_of(runner).is_exact for runner in runners] == [True, True]


def test_a_model_without_a_kv_cache_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="takes no KV cache"):
        cache_argument(nn.Linear(1, 1))
