"""Which layers of a model are alike. What is tried of a model in passes is tried down to the depth at which it has had
layers of every kind: those below differ from them in their numbers alone.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from shared.errors import UnsupportedModel
from shared.model.parts import find_layers
from shared.model.substitution.match import signature
from shared.model.weights.lazy import lazy

_KINDS = "_neap_layer_kinds"  # an attribute of the model, because modules have other forwards once they are replaced
# Layers that are always tried: one that gets its state from a layer, and one that gives it to another.
_FEWEST = 2


@dataclass(frozen=True)
class LayerKinds:
    """`path`: the name of the list of layers. `kinds`: those of all layers; equal ones are alike."""

    path: str
    kinds: tuple[Hashable, ...]

    @property
    def depth(self) -> int:
        """The smallest depth above which there are layers of all kinds."""
        last_new = max(map(self.kinds.index, self.kinds))
        return min(max(last_new + 1, _FEWEST), len(self.kinds))

    def told_apart_by(self, facts: Sequence[Hashable]) -> "LayerKinds":
        """Kinds of layers that have the same of `facts`, too, of which there is one for each layer."""
        return replace(self, kinds=tuple(zip(self.kinds, facts, strict=True)))

    def alike(self, name: str) -> list[str]:
        """The names of the modules that are in layers of the same kind what module `name` is in its own layer. Itself
        alone if it is in none."""
        start = f"{self.path}."
        index, dot, rest = name.removeprefix(start).partition(".")
        if not name.startswith(start):
            return [name]
        kind = self.kinds[int(index)]
        return [f"{start}{other}{dot}{rest}" for other, each in enumerate(self.kinds) if each == kind]


def layer_kinds(model: PreTrainedModel) -> LayerKinds | None:
    """A layer's kind is the `signature` of its modules, the number formats of their weights, and what lists of the
    configuration say of it. To be called before modules are replaced. None if no layers are found: such a model can be
    accelerated, and cannot be served."""
    found: LayerKinds | None = vars(model).get(_KINDS)
    if found is None:
        config = model.config.get_text_config(decoder=True)
        try:
            path, layers = find_layers(model, config.num_hidden_layers)
        except UnsupportedModel:
            return None
        numbers = list(range(len(layers)))  # such as those of all layers with experts
        lists = [each for each in config.to_dict().values() if isinstance(each, list) and each != numbers]
        lists = [each for each in lists if len(each) == len(layers)]
        kinds = (
            (signature(layer), _formats(layer), str([each[index] for each in lists]))
            for index, layer in enumerate(layers)
        )
        found = vars(model)[_KINDS] = LayerKinds(path, tuple(kinds))
    return found


def _formats(layer: nn.Module) -> tuple[str, ...]:
    """Those of weights that are still in a file."""
    stored = (lazy(parameter) for parameter in layer.parameters())
    return tuple("" if each is None else each.format for each in stored)


@contextmanager
def only_first_layers(model: PreTrainedModel, kinds: LayerKinds | None) -> Iterator[None]:
    """Within it, the model ends at the depth of `kinds`. None: it is as it is."""
    if kinds is None:
        yield
        return
    layers = model.get_submodule(kinds.path)
    whole = layers._modules
    layers._modules = dict([*whole.items()][: kinds.depth])
    try:
        yield
    finally:
        layers._modules = whole
