"""Ladders of random weights: they say something at every exit, right by chance only."""

from collections.abc import Sequence

import torch

from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.exit_head import ExitHead
from shared.ladder.exits import LayerExit
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.model.loaded import LoadedModel


def random_confidence(loaded: LoadedModel, seed: int) -> ConfidenceHead:
    """Unsure of this and sure of that."""
    torch.manual_seed(seed)
    confidence = ConfidenceHead(loaded.hidden_size, 8)
    for parameter in confidence.parameters():
        torch.nn.init.normal_(parameter)
    return confidence


def random_ladder(loaded: LoadedModel, seed: int, depths: Sequence[int] = (0, 2), *, agreement: float = 0.0) -> Ladder:
    """Routers are unsure of this and sure of that; every second token of the vocabulary can be drafted.

    `agreement` is what a planner expects of each exit.
    """
    torch.manual_seed(seed)
    width = loaded.hidden_size
    exits = [LayerExit(d, ExitHead(width, 32), random_confidence(loaded, seed + d), agreement) for d in depths]
    vocabulary = torch.arange(0, loaded.vocabulary_size, 2)
    return Ladder(ModelIdentity.of(loaded), exits=tuple(exits), draft_vocabulary=vocabulary)
