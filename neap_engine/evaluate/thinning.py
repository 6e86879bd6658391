"""Uniform layer skipping: a model that lacks some of its layers, evenly spread."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from neap_engine.evaluate.sides import Side, neap
from shared.engine.engine import Engine
from shared.ladder.policy import DepthPolicy
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.parts import find_parts


def evenly_kept(num_layers: int, num_kept: int) -> tuple[int, ...]:
    """`num_kept` of the layers, the first and the last among them: at least 2, evenly spaced."""
    steps = max(num_kept, 2) - 1
    return tuple(round(place * (num_layers - 1) / steps) for place in range(steps + 1))


def kept_at_speed(loaded: LoadedModel, speed_up: float) -> int:
    """Number of layers to keep so that a step is about `speed_up` times as fast: its time is that of reading the
    weights of layers and head."""
    layer = sum(p.numel() for p in loaded.parts.layers[0].parameters())
    head = loaded.parts.hidden_size * loaded.vocabulary_size
    whole = head + loaded.num_layers * layer
    return max(2, min(loaded.num_layers, round((whole / speed_up - head) / max(layer, 1))))


def thinned(loaded: LoadedModel, kept_layers: tuple[int, ...]) -> LoadedModel:
    """The model with the layers `kept_layers` only, in place: `loaded` must not be used afterwards."""
    model, layers = loaded.model, loaded.parts.layers
    whole: Any = model.config.get_text_config(decoder=True)
    if types := getattr(whole, "layer_types", None):
        whole.layer_types = [types[index] for index in kept_layers]
    whole.num_hidden_layers = len(kept_layers)
    path, _, name = loaded.parts.layers_path.rpartition(".")
    # Each layer keeps its number, under which caches hold its keys and values.
    setattr(model.get_submodule(path), name, nn.ModuleList(layers[index] for index in kept_layers))
    return replace(loaded, parts=find_parts(model))


def thinned_side(
    source: str, options: dict[str, Any], kept_layers: tuple[int, ...], max_tokens: int
) -> Callable[[Any], Any]:
    """A `Side` that answers with a thinned model, for a process of its own: see `in_process`.
    `options`: of `load_model`."""
    engine = Engine(thinned(load_model(source, **options), kept_layers), prefix_cache_bytes=0)
    side: Side = neap(engine, DepthPolicy("full"), None, max_tokens)
    return side
