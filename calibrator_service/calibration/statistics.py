"""What a router was made from, as sums that add: a later calibration goes on from them.
Published beside the router, read by no worker. A parent is a router with its statistics, its heads, or both."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from calibrator_service.calibration.spec import CalibrationSpec, ParentRouter
from calibrator_service.calibration.states.moments import Moments, MomentsLayout
from calibrator_service.calibration.states.ngram_builder import NgramTableBuilder
from calibrator_service.calibration.states.training_data import TrainingData
from shared.digests import digest_of
from shared.errors import Corrupt, InvalidInput, PreconditionFailed, RouterMismatch
from shared.ladder.artefact import take_part, unpack_heads
from shared.ladder.exits import Heads
from shared.ladder.proposers import exit_name
from shared.model.loaded import LoadedModel

# 1 unless sums are projected.
FORMAT = 2
# Upper limit of the file. A model of hidden size 1,536 needs 210 MB for each exit and up to 80 MB for the counts of
# n-grams; the sums of a model of 4,096 are projected.
MAX_BYTES, HEADER_BYTES = 1 << 30, 1 << 16
_HEADER = "neap"


@dataclass(frozen=True)
class Statistics:
    """`fingerprint`, `tokenizer`: digests of the model and the vocabulary whose states and tokens were summed.

    `moments`: by depth of the exit; `choice_counts` [V] float64: how often the full model chose each token;
    `num_tokens`: tokens learned from, of which a parent's count by its share; `learned` [P] int64: digests of the
    prompts and answers learned from, see `text.splits.Splitter`; `generation`: number of ancestors.
    """

    fingerprint: str
    tokenizer: str
    moments: Mapping[int, Moments]
    ngrams: NgramTableBuilder
    choice_counts: Tensor
    num_tokens: float
    learned: Tensor
    generation: int = 0

    @classmethod
    def of(cls, loaded: LoadedModel, material: TrainingData, learned: Collection[int]) -> "Statistics":
        """What a calibration has learned from its own text. `learned`: the splitter's."""
        return cls(
            loaded.fingerprint,
            tokenizer_digest(loaded),
            material.moments,
            material.ngrams,
            material.choice_counts.double(),
            float(material.num_tokens["heads"]),
            torch.tensor(sorted(learned), dtype=torch.long),
        )

    @classmethod
    def none(cls, loaded: LoadedModel) -> "Statistics":
        """What has learned nothing."""
        return cls(
            loaded.fingerprint,
            tokenizer_digest(loaded),
            {},
            NgramTableBuilder(),
            torch.zeros(loaded.vocabulary_size, dtype=torch.float64),
            0.0,
            torch.empty(0, dtype=torch.long),
        )

    def plus(self, parent: "Statistics", share: float) -> "Statistics":
        """The sums of this text and `share` of the parent's, for the exits of this text. Neither of the two changes.

        Raises `PreconditionFailed` (LAYOUT_MISMATCH) if an exit of this text is not one of the parent's, or is made of
        other states.
        """
        moments: dict[int, Moments] = {}
        for depth, sums in self.moments.items():
            total = Moments(sums.layout, sums.device)
            total.merge(sums)
            total.merge(_moments_at(parent, depth), share)
            moments[depth] = total
        ngrams = NgramTableBuilder()
        ngrams.add_counts(self.ngrams)
        ngrams.add_counts(parent.ngrams, share)
        return Statistics(
            self.fingerprint,
            self.tokenizer,
            moments,
            ngrams,
            self.choice_counts + share * parent.choice_counts,
            self.num_tokens + share * parent.num_tokens,
            torch.cat([self.learned, parent.learned]).unique(),
            parent.generation + 1,
        )

    def has_sums(self, depths: Collection[int]) -> bool:
        """Whether heads at these depths can be solved from it."""
        return all(depth in self.moments for depth in depths)

    def check(self, loaded: LoadedModel, layouts: Mapping[int, MomentsLayout]) -> None:
        """Raises `RouterMismatch` (also TOKENIZER_MISMATCH) unless they are of this model, and `PreconditionFailed`
        (LAYOUT_MISMATCH) unless they have these exits."""
        if self.fingerprint != loaded.fingerprint:
            raise RouterMismatch(
                "the parent's statistics are of another model or another revision of it",
                metadata={"parent": self.fingerprint, "model": loaded.fingerprint},
            )
        if self.tokenizer != tokenizer_digest(loaded):
            raise RouterMismatch("the parent's statistics are of another tokenizer", reason="TOKENIZER_MISMATCH")
        for depth, layout in layouts.items():
            parent_layout = _moments_at(self, depth).layout
            if parent_layout != layout:
                raise PreconditionFailed(
                    f"the parent's exit at depth {depth} is made of the states of {parent_layout}, that of this "
                    f"calibration of {layout}",
                    reason="LAYOUT_MISMATCH",
                )

    def to_bytes(self) -> bytes | None:
        """A safetensors file of at most MAX_BYTES, which `read_statistics` reads: sums that are too large for it are
        projected. None if counts alone take more."""
        tensors = {"choice_counts": self.choice_counts, "learned": self.learned}
        for name, tensor in self.ngrams.to_tensors().items():
            tensors[f"successors.{name}"] = tensor
        left = MAX_BYTES - HEADER_BYTES - sum(tensor.nbytes for tensor in tensors.values())
        for depth, moments in self.moments.items():
            for name, tensor in moments.to_tensors(most_bytes=left / len(self.moments)).items():
                tensors[f"{exit_name(depth)}.{name}"] = tensor.contiguous()
        if sum(tensor.nbytes for tensor in tensors.values()) > MAX_BYTES - HEADER_BYTES:
            return None
        header = {
            "format": FORMAT if any(name.endswith(".root") for name in tensors) else 1,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer,
            "num_tokens": self.num_tokens,
            "generation": self.generation,
            "exits": [
                [depth, sums.layout.hidden_size, sums.layout.kept_depths] for depth, sums in self.moments.items()
            ],
        }
        return save(tensors, metadata={_HEADER: json.dumps(header)})


def read_statistics(path: Path) -> Statistics:
    """Reads a file of `Statistics.to_bytes`.

    Raises `Corrupt` for anything else, numbers that are not finite among them, and `PreconditionFailed`
    (SCHEMA_TOO_NEW) for a later format.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if isinstance(header["format"], int) and header["format"] > FORMAT:
            raise PreconditionFailed(
                f"the parent's statistics have format {header['format']}; this version of neap reads {FORMAT}",
                reason="SCHEMA_TOO_NEW",
            )
        return _statistics(header, tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt("the parent's statistics cannot be read") from error


def _statistics(header: Mapping[str, Any], tensors: dict[str, Tensor]) -> Statistics:
    choice_counts, learned = tensors.pop("choice_counts"), tensors.pop("learned")
    moments = {}
    for depth, hidden_size, kept_depths in header["exits"]:
        layout = MomentsLayout(hidden_size, depth, tuple(kept_depths))
        moments[depth] = Moments.from_tensors(take_part(tensors, exit_name(depth)), layout)
    ngrams = NgramTableBuilder.from_tensors(take_part(tensors, "successors"), len(choice_counts))
    numbers = torch.tensor([header["num_tokens"], header["generation"]], dtype=torch.float64)
    if (
        tensors
        or choice_counts.dtype != torch.float64
        or choice_counts.dim() != 1
        or learned.dtype != torch.int64
        or learned.dim() != 1
        or not all(bool((t.isfinite() & (t >= 0)).all()) for t in (choice_counts, numbers))
    ):
        raise Corrupt("the parent's statistics hold what is not part of their format")
    return Statistics(
        str(header["fingerprint"]),
        str(header["tokenizer"]),
        moments,
        ngrams,
        choice_counts,
        float(header["num_tokens"]),
        learned,
        int(header["generation"]),
    )


def _moments_at(statistics: Statistics, depth: int) -> Moments:
    if depth not in statistics.moments:
        known = ", ".join(map(str, statistics.moments)) or "none"
        raise PreconditionFailed(
            f"the parent's statistics have no exit at depth {depth}; they have: {known}. Name these depths, or no "
            "parent",
            reason="LAYOUT_MISMATCH",
            metadata={"depth": str(depth), "depths": known},
        )
    return statistics.moments[depth]


def tokenizer_digest(loaded: LoadedModel) -> str:
    """The digest of the tokens and their ids; "" for a model without a tokenizer."""
    if loaded.tokenizer is None:
        return ""
    tokens = json.dumps(loaded.tokenizer.get_vocab(), sort_keys=True, separators=(",", ":"))
    return digest_of(tokens.encode())


# Moves a seed by generation, so that nobody gets an ancestor's seed by counting up.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Parent:
    """`router`: which it is and how much its tokens count; `statistics`: what it was made from, its own parents'
    included; `heads_blob`: where the heads are that its child may have, too, and `heads`, these, if there are any. If
    it is empty, the child gets its own."""

    router: ParentRouter
    statistics: Statistics
    heads: Heads | None = None
    heads_blob: bytes = b""

    @classmethod
    def read(cls, path: Path, router: ParentRouter) -> "Parent":
        """`path`: the router's file of statistics. Raises as `read_statistics`."""
        return cls(router, read_statistics(path))

    @property
    def gives_heads(self) -> bool:
        return bool(self.heads_blob)

    @classmethod
    def with_heads(
        cls, statistics: Path | None, heads_blob: Path, router: ParentRouter, loaded: LoadedModel
    ) -> "Parent":
        """Files of the router. Raises as `read_statistics` and `unpack_heads`, and RouterMismatch for another model's
        heads."""
        data = heads_blob.read_bytes()
        if (heads := unpack_heads(data)) is not None and (
            any(head.hidden_size != loaded.hidden_size for head in heads.by_depth.values())
            or max(heads.by_depth) >= loaded.num_layers
            or int(heads.vocabulary.max()) >= loaded.vocabulary_size
        ):
            raise RouterMismatch("the parent's heads are of another model")
        known = read_statistics(statistics) if statistics is not None else Statistics.none(loaded)
        return cls(router, known, heads, data)

    def spec_of_child(self, spec: CalibrationSpec) -> CalibrationSpec:
        """The spec with this parent, and with a seed that its ancestors did not have: with theirs the model would write
        their text again.

        Raises `InvalidInput` (BAD_SPEC) if the spec names another parent.
        """
        if spec.parent not in (None, self.router):
            raise InvalidInput("the spec names another parent than the one that is given", reason="BAD_SPEC")
        seed = (spec.seed + (self.statistics.generation + 1) * _SEED_STEP) % 2**63
        return replace(spec, parent=self.router, seed=seed)
