"""A ladder: the proposers of one model, and their use while a sequence is decoded."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.errors import RouterMismatch
from shared.ladder.exits import ExitProposer, Heads, LayerExit, bind_exit
from shared.ladder.head_rows import gather_rows, head_width
from shared.ladder.joint_weights import DEFAULT_WEIGHTS, JointWeights
from shared.ladder.ngram_table import NgramTable
from shared.ladder.proposers import NGRAM_TABLE, PROMPT_LOOKUP
from shared.ladder.recorded_chain import RecordedChain
from shared.ladder.table_confidence import TableConfidence
from shared.ladder.tables import SequenceTables
from shared.model.inference import inference
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner, captured_depths
from shared.ops.chains import Chains, ChainStart


@dataclass(frozen=True)
class ModelIdentity:
    """The model a ladder was calibrated for."""

    model_id: str
    fingerprint: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocabulary_size: int

    @classmethod
    def of(cls, loaded: LoadedModel) -> "ModelIdentity":
        return cls(
            model_id=loaded.model_id,
            fingerprint=loaded.fingerprint,
            architecture=loaded.architecture,
            num_layers=loaded.num_layers,
            hidden_size=loaded.hidden_size,
            vocabulary_size=loaded.vocabulary_size,
        )


@dataclass(frozen=True)
class Ladder:
    """The proposers of one model. Immutable.

    `exits`: shallowest first. `draft_vocabulary` [Vd] int64: the tokens that exits may propose; None only if there are
    no exits. `joint_weights`: what to make of all that they say of one position. `is_trained`: whether anything of it
    was learned from the weights of its model. Otherwise it is good for all of these sizes. `heads`: where its heads
    and vocabulary are from, if other ladders may have the same.
    """

    model: ModelIdentity
    lookup_confidence: TableConfidence | None = None
    ngrams: NgramTable | None = None
    ngram_confidence: TableConfidence | None = None
    exits: tuple[LayerExit, ...] = ()
    draft_vocabulary: Tensor | None = None
    joint_weights: JointWeights = DEFAULT_WEIGHTS
    is_trained: bool = True
    heads: Heads | None = None

    @property
    def model_fingerprint(self) -> str:
        return self.model.fingerprint

    @property
    def proposer_names(self) -> tuple[str, ...]:
        """Names of all proposers, in draft order."""
        names = [PROMPT_LOOKUP] if self.lookup_confidence else []
        names += [NGRAM_TABLE] if self.ngrams and self.ngram_confidence else []
        return (*names, *(layer_exit.name for layer_exit in self.exits))

    def check_model(self, loaded: LoadedModel) -> None:
        """Raises `RouterMismatch` unless `loaded` is the model this ladder was calibrated for, and can have its
        exits."""
        if self.is_trained and loaded.fingerprint != self.model.fingerprint:
            raise RouterMismatch(
                f"the router was calibrated for {self.model.model_id}; the loaded model is another one or another "
                "revision of it: calibrate one for it, or ask for the policy full",
                metadata={"router_fingerprint": self.model.fingerprint, "model_fingerprint": loaded.fingerprint},
            )
        # A fingerprint says nothing of what stands beside it in a manifest that somebody has written.
        claimed, found = (
            {"layers": model.num_layers, "states": model.hidden_size, "tokens": model.vocabulary_size}
            for model in (self.model, loaded)
        )
        if self.exits:
            claimed["inputs of its head"] = self.model.hidden_size
            found["inputs of its head"] = head_width(loaded.parts.head)
        for name, size in found.items():
            if size != claimed[name]:
                raise RouterMismatch(f"the router is for a model with {claimed[name]} {name}; this one has {size}")

    def bind(self, runner: Runner, beside: Iterable["BoundLadder"] = ()) -> "BoundLadder":
        """Prepares the ladder for a model in memory. What it has in common with those that are bound `beside` it is
        bound once. Raises `RouterMismatch` if it was calibrated for another model."""
        self.check_model(runner.loaded)
        return BoundLadder(self, runner, beside)


class BoundLadder:
    """A ladder ready for use with its model: head rows gathered once, heads and confidence heads in float32 on the
    model's device."""

    def __init__(self, ladder: Ladder, runner: Runner, beside: Iterable["BoundLadder"] = ()) -> None:
        self.ladder = ladder
        self.depths = tuple(layer_exit.depth for layer_exit in ladder.exits)
        self.names = tuple(layer_exit.name for layer_exit in ladder.exits)
        self.agreements = tuple(layer_exit.agreement for layer_exit in ladder.exits)
        self.joint_weights = ladder.joint_weights
        # Everything that the time of an exit depends on: ladders with equal layouts share measured costs.
        vocabulary = ladder.draft_vocabulary
        self.layout: object = (0 if vocabulary is None else len(vocabulary), *(e.layout for e in ladder.exits))
        # The depths below L whose settled states chains begin with.
        self.kept_depths = captured_depths(runner.num_layers) if ladder.exits else ()
        self._device_tables: list[list[Tensor]] = []
        self._bound: list[ExitProposer] = []
        if ladder.exits:
            device = runner.loaded.device
            for layer_exit in ladder.exits:
                layer_exit.head.to(device).requires_grad_(False)
                layer_exit.confidence.to(device).requires_grad_(False)
            shared = (exits for other in beside if (exits := other.exits_for(ladder)))
            self._bound = next(shared, []) or _bind_exits(ladder, runner)
        # The depths of exits that read the states with which tokens enter them.
        bound = zip(self.depths, self._bound, strict=True)
        self.state_depths = tuple(depth for depth, proposer in bound if proposer.reads_states)

    @property
    def chain_at_start(self) -> RecordedChain | None:
        """The exit at depth 0 whose steps can be recorded, if it is the only exit."""
        alone = self._bound[0] if len(self._bound) == 1 else None
        return alone if isinstance(alone, RecordedChain) else None

    @property
    def drafts_on_device(self) -> bool:
        """Whether all that it drafts can be drafted without the host."""
        return not self._bound or self.chain_at_start is not None

    def prepare(self) -> Iterator[None]:
        """Records what drafting would otherwise record at first use.
        Yields between steps, so that other work can run."""
        for proposer in self._bound:
            if isinstance(proposer, RecordedChain):
                yield from proposer.prepare()

    def exits_for(self, ladder: Ladder) -> list[ExitProposer]:
        """Its exits with the confidence heads of another ladder that has the same heads and vocabulary; none for any
        other."""
        mine = {layer_exit.head: bound for layer_exit, bound in zip(self.ladder.exits, self._bound, strict=True)}
        if ladder.draft_vocabulary is not self.ladder.draft_vocabulary or any(e.head not in mine for e in ladder.exits):
            return []
        return [mine[layer_exit.head].with_confidence(layer_exit.confidence) for layer_exit in ladder.exits]

    def tables_on(self, device: torch.device) -> list[list[Tensor]]:
        """Keys, tokens, counts and shares of the orders of its n-gram table, as bytes on the model's device; empty
        without one. What is empty gets an address all the same."""
        ladder = self.ladder
        if not self._device_tables and ladder.ngrams is not None and ladder.ngram_confidence is not None:
            self._device_tables = [
                [torch.from_numpy(np.append(part.view("u1"), 0)).to(device) for part in column]
                for column in ladder.ngrams.columns
            ]
        return self._device_tables

    def memory(self) -> Mapping[int, int]:
        """What it keeps in memory, on the host and on the model's device: address -> bytes. What it shares with others
        has the same address there. Recordings of work are not counted, nor what is the model's."""
        ladder = self.ladder
        held = [tensor for layer_exit in ladder.exits for tensor in layer_exit.held()]
        held += [tensor for bound in self._bound for tensor in bound.held() if tensor is not None]
        held += [ladder.draft_vocabulary] if ladder.draft_vocabulary is not None else []
        held += [part for column in self._device_tables for part in column]
        storages = (tensor.untyped_storage() for tensor in held)
        arrays = (part for column in (ladder.ngrams.columns if ladder.ngrams else ()) for part in column)
        return {
            **{storage.data_ptr(): storage.nbytes() for storage in storages},
            **{part.ctypes.data: part.nbytes for part in arrays},
        }

    def tables(self, *arguments: Any) -> SequenceTables:
        """The tables of a new sequence, of `arguments` as `SequenceTables` takes them."""
        return SequenceTables(*arguments)

    @inference
    def propose(self, index: int, starts: Sequence[ChainStart]) -> Chains:
        """The drafts of `exits[index]`, of all chains in one call. See `ExitProposer.propose`.

        An exit at one of the `state_depths` reads `entering` of `starts`.
        """
        return self._bound[index].propose(starts)


def _bind_exits(ladder: Ladder, runner: Runner) -> list[ExitProposer]:
    assert ladder.draft_vocabulary is not None
    vocabulary = ladder.draft_vocabulary.to(runner.loaded.device)
    rows, bias = gather_rows(runner.loaded.parts.head, vocabulary)
    return [bind_exit(layer_exit, rows, bias, vocabulary, runner) for layer_exit in ladder.exits]
