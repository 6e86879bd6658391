"""Finds the parts of a Hugging Face causal LM that depth execution needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shared.errors import UnsupportedModel

# Layers of these types keep a state other than keys and values.
# A token that skipped such a layer could not run through it later.
RECURRENT_MARKS = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv")


@dataclass(frozen=True)
class ModelParts:
    """`layers_path`: the name of the layer list in the model, e.g. "model.layers". `final_norm`: None if no module
    beside the layers looks like a norm."""

    layers: nn.ModuleList
    layers_path: str
    final_norm: nn.Module | None
    embedding: nn.Module
    head: nn.Module
    num_layers: int
    hidden_size: int
    vocabulary_size: int


def find_parts(model: PreTrainedModel) -> ModelParts:
    """The parts of `model`. Raises `UnsupportedModel` with what was looked for and what was found instead."""
    config = model.config.get_text_config(decoder=True)
    architecture = type(model).__name__
    refuse_config(model.config, architecture)
    num_layers = config.num_hidden_layers
    if getattr(model, "_is_stateful", False):
        raise _unsupported(architecture, "it keeps a recurrent state, so a token cannot catch up later")
    path, layers = find_layers(model, num_layers)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or not hasattr(embedding, "weight"):
        raise _unsupported(architecture, "get_input_embeddings() found no embedding with a weight")
    if head is None or not hasattr(head, "weight"):
        raise _unsupported(architecture, "get_output_embeddings() found no language-model head")
    return ModelParts(
        layers=layers,
        layers_path=path,
        final_norm=_find_final_norm(model, path, config.hidden_size),
        embedding=embedding,
        head=head,
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        vocabulary_size=head.weight.shape[0],
    )


def _unsupported(architecture: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{architecture} cannot be run in parts: {why}", metadata={"architecture": architecture})


def refuse_config(whole: PreTrainedConfig, architecture: str | None = None) -> None:
    """Raises `UnsupportedModel` for models that their config already rules out, so before their weights are read."""
    config = whole.get_text_config(decoder=True)
    architecture = architecture or config.model_type
    if getattr(whole, "is_encoder_decoder", False):
        raise _unsupported(architecture, "it is an encoder-decoder model")
    if not getattr(config, "num_hidden_layers", None):
        raise _unsupported(architecture, "its config has no num_hidden_layers")
    for layer_type in getattr(config, "layer_types", None) or ():
        if any(mark in layer_type for mark in RECURRENT_MARKS):
            raise _unsupported(architecture, f"it has layers of type {layer_type!r}")


def find_layers(model: PreTrainedModel, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The name and the list of the decoder layers.
    Raises `UnsupportedModel` if no ModuleList has `num_layers` modules."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    fitting = [(name, module) for name, module in lists if len(module) == num_layers]
    if not fitting:
        seen = ", ".join(f"{name} ({len(module)})" for name, module in lists) or "none at all"
        raise _unsupported(
            type(model).__name__, f"no ModuleList of num_hidden_layers = {num_layers} modules; found {seen}"
        )
    return min(fitting, key=lambda item: item[0].count("."))


def _find_final_norm(model: PreTrainedModel, layers_path: str, width: int) -> nn.Module | None:
    parent_path = layers_path.rpartition(".")[0]
    norms = [
        module
        for name, module in model.get_submodule(parent_path).named_children()
        if "norm" in type(module).__name__.lower()
        and "embed" not in name
        and all(vector.shape == (width,) for vector in module.parameters())
    ]
    return norms[-1] if norms else None


def layer_configs(config: PreTrainedConfig) -> Sequence[Any]:
    """One configuration for each layer: `config` itself where all layers have the same.

    Where they differ, transformers refuses to give the setting of all layers, so it must be asked of each layer.
    """
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def setting_of(config: PreTrainedConfig, name: str) -> Any:
    """The setting `name`, None if there is none; a list with one value for each layer if layers differ."""
    values = [getattr(layer, name, None) for layer in layer_configs(config)]
    return values[0] if all(value == values[0] for value in values) else values
