"""The configuration of each decoder layer. In some models, such as Gemma 4, layers differ in settings like the width of
their heads."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig


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
