"""The published form of a ladder: a JSON manifest and one safetensors blob.
It holds no code, and reading it checks every field.

A ladder that has the heads of another router leaves them out, names a second blob, which is the first of that router,
and says `"heads": "heads.safetensors"`. In the registry, on disks and in memory both then have the heads once.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from shared.errors import Corrupt, PreconditionFailed
from shared.ladder.blob_names import HEADS_BLOB, LADDER_BLOB, MAX_BLOB_BYTES, served_blobs
from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.exit_head import ExitHead
from shared.ladder.exits import Heads, LayerExit
from shared.ladder.joint_weights import JointWeights
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.ngram_table import NgramTable
from shared.ladder.proposers import NGRAM_TABLE, PROMPT_LOOKUP, exit_name
from shared.ladder.table_confidence import TableConfidence
from shared.model.own_thread import run_in_own_thread

# 1 to 3 were forms before the first release.
SCHEMA_VERSION = 5
BLOB = LADDER_BLOB
# Upper limits of the sizes in a manifest, because memory is allocated by them.
MAX_HIDDEN_SIZE, MAX_CONFIDENCE_WIDTH, MAX_EXITS = 65_536, 8_192, 64
MAX_MLP_WIDTH = 4 * MAX_HIDDEN_SIZE
MAX_VOCABULARY = 1 << 22
# First bytes of pickle protocols 2 to 5. Protocols 0 and 1 have no such mark.
PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
MAX_DIMENSIONS = 2
SHIPPED_DTYPES = (torch.float16, torch.int32, torch.int16, torch.uint8)


def round_weights(module: nn.Module) -> None:
    """Rounds the weights in place to the published precision, float16, so that figures measured after this hold when
    serving."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.clamp(-60_000, 60_000).half().float())


def pack_ladder(
    ladder: Ladder, report: Mapping[str, Any], heads: bytes | None = None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(manifest, blobs) of a ladder. `heads`: the blob of the router whose heads it has, if it has another's.

    `report` is what `calibrate` returned. Its "proposers" figures go to the manifest's proposers. The rest becomes the
    manifest's "calibration".

    The weights are stored as float16 and must have been rounded before (`round_weights`).
    """
    figures: Mapping[str, Mapping[str, float]] = report.get("proposers", {})
    tensors: dict[str, Tensor] = {}
    proposers: list[dict[str, Any]] = []

    def proposer(name: str, depth: int, **layout: Any) -> None:
        proposers.append({"name": name, "depth": depth, **layout, "figures": dict(figures.get(name, {}))})

    if ladder.lookup_confidence is not None:
        proposer(PROMPT_LOOKUP, 0, confidence=ladder.lookup_confidence.to_json())
    if ladder.ngrams is not None and ladder.ngram_confidence is not None:
        table = ladder.ngrams.to_tensors()
        tensors |= {f"{NGRAM_TABLE}.{name}": tensor for name, tensor in table.items()}
        proposer(NGRAM_TABLE, 0, confidence=ladder.ngram_confidence.to_json())
    for layer_exit in ladder.exits:
        head, confidence = layer_exit.head, layer_exit.confidence
        for part, module in (("head", head), ("confidence", confidence))[heads is not None :]:
            for name, tensor in module.state_dict().items():
                tensors[f"{layer_exit.name}.{part}.{name}"] = tensor.detach().half().cpu().contiguous()
        proposer(
            layer_exit.name,
            layer_exit.depth,
            mlp_width=head.mlp_width,
            head_width=head.hidden_size,
            confidence_width=confidence.hidden.out_features,
        )
    if ladder.draft_vocabulary is not None and heads is None:
        tensors[VOCABULARY] = ladder.draft_vocabulary.to(torch.int32).cpu()
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "model": _model_json(ladder.model),
        "proposers": proposers,
        "draft_vocabulary": 0 if ladder.draft_vocabulary is None else len(ladder.draft_vocabulary),
        "joint_weights": ladder.joint_weights.to_json(),
        "calibration": {key: value for key, value in report.items() if key != "proposers"},
    }
    blobs = {BLOB: save(tensors)}
    if heads is not None and ladder.exits:
        manifest["heads"] = HEADS_BLOB
        blobs[HEADS_BLOB] = heads
    return json.loads(json.dumps(manifest, allow_nan=False)), blobs


def _model_json(model: ModelIdentity) -> dict[str, Any]:
    fields = asdict(model)
    model_id = fields.pop("model_id")
    folder = PurePath(model_id)
    # A model that the library loaded from a folder has the folder's path as its id. What is published has no paths.
    return {"id": folder.name if folder.is_absolute() else model_id, **fields}


def unpack_ladder(manifest: Mapping[str, Any], blobs: Mapping[str, bytes], heads: Heads | None = None) -> Ladder:
    """The ladder that `pack_ladder` packed. Statistics among `blobs` are not looked at. `heads`: those of the blob that
    has its heads, if they are in memory. If that blob is another router's, it may then be missing.

    Raises `PreconditionFailed` for another format (SCHEMA_TOO_NEW, SCHEMA_TOO_OLD), and `Corrupt` for wrong names,
    shapes or dtypes, numbers that are not finite, sizes above the limits of this module, and pickles (PICKLE_REFUSED).
    """
    return run_in_own_thread(_unpack, manifest, blobs, heads)


def _unpack(manifest: Mapping[str, Any], blobs: Mapping[str, bytes], heads: Heads | None) -> Ladder:
    version = manifest.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise PreconditionFailed(
            f"the router has format {version}; this version of neap reads format {SCHEMA_VERSION}",
            reason="SCHEMA_TOO_NEW",
        )
    if version in range(1, SCHEMA_VERSION):
        raise PreconditionFailed(
            "the router has the form that neap had before version 0.1.0: calibrate the model again",
            reason="SCHEMA_TOO_OLD",
        )
    source = manifest.get("heads", BLOB)
    found, needed = set(served_blobs(blobs)), {BLOB} if heads else {BLOB, source}
    if version != SCHEMA_VERSION or source not in (BLOB, HEADS_BLOB) or not needed <= found <= {BLOB, source}:
        raise Corrupt("the router has no valid schema_version, or its blobs are not those that its manifest names")
    try:
        tensors = _tensors(blobs[BLOB])
        own = {name: tensors.pop(name) for name in list(tensors) if source == BLOB and _is_of_heads(name)}
        if heads is None:
            heads = _heads(own if source == BLOB else _tensors(blobs[HEADS_BLOB]))
        return _Unpacker(manifest, tensors, heads).ladder()
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
        raise Corrupt("a field of the router's manifest is missing or not valid") from error


def _tensors(data: bytes) -> dict[str, Tensor]:
    if len(data) > MAX_BLOB_BYTES:
        raise Corrupt("the router's blob is too large")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        _refuse_pickle(data)
        raise Corrupt("the router's blob is not safetensors") from error
    for name, tensor in tensors.items():
        # Checked before isfinite, which torch does not support for some other dtypes.
        if tensor.dtype not in SHIPPED_DTYPES or tensor.dim() > MAX_DIMENSIONS:
            raise Corrupt(f"{name[:80]} has a dtype or shape that no router uses")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Corrupt(f"{name} holds numbers that are not finite")
    return tensors


def unpack_heads(data: bytes) -> Heads | None:
    """The heads that a router's blob has, None without any. Raises as `unpack_ladder`."""
    return run_in_own_thread(_unpack_heads, data)


def _unpack_heads(data: bytes) -> Heads | None:
    try:
        return _heads(_tensors(data))
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt("the heads of the router's blob are not valid") from error


VOCABULARY = "draft_vocabulary"


def _is_of_heads(name: str) -> bool:
    return name == VOCABULARY or ".head." in name


def _heads(tensors: Mapping[str, Tensor]) -> Heads | None:
    """The heads among the tensors of a router, None without any. Sizes are those of the tensors."""
    by_exit: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name != VOCABULARY and _is_of_heads(name):
            exit_, _, part = name.partition(".head.")
            by_exit.setdefault(exit_, {})[part] = tensor
    stored = tensors.get(VOCABULARY)
    if (stored is None) == bool(by_exit):
        raise Corrupt("the router has exits without a draft vocabulary, or the reverse")
    if stored is None:
        return None
    vocabulary = stored.long()
    valid = stored.dtype == torch.int32 and stored.dim() == 1 and len(stored) > 0
    if not valid or int(vocabulary.min()) < 0 or len(vocabulary.unique()) != len(vocabulary):
        raise Corrupt("the draft vocabulary is not a set of tokens")
    heads = {}
    for name, parts in by_exit.items():
        # The meta device allocates nothing.
        with torch.device("meta"):
            head = ExitHead(len(parts["norm"]), len(parts["gate"]))
        _fill(head, parts)
        heads[int(name.removeprefix("depth-"))] = head.eval()
    return Heads(heads, vocabulary)


def _refuse_pickle(data: bytes) -> None:
    """Raises `Corrupt` (PICKLE_REFUSED) for a zip file as torch.save writes it, or a bare pickle of protocol 2 or
    later."""
    if data.startswith((b"PK\x03\x04", *PICKLE_STARTS)):
        raise Corrupt(
            "the router's blob is a pickle, which may run code when it is loaded; only safetensors are read",
            reason="PICKLE_REFUSED",
        )


class _Unpacker:
    """`tensors`: but for those of the `heads`."""

    def __init__(self, manifest: Mapping[str, Any], tensors: dict[str, Tensor], heads: Heads | None) -> None:
        self.manifest, self.tensors, self.heads = manifest, tensors, heads

    def ladder(self) -> Ladder:
        fields = dict(self.manifest["model"])
        model = ModelIdentity(
            model_id=_text(fields["id"]),
            fingerprint=_text(fields["fingerprint"]),
            architecture=_text(fields["architecture"]),
            num_layers=_size(fields["num_layers"], 100_000),
            hidden_size=_size(fields["hidden_size"], MAX_HIDDEN_SIZE),
            vocabulary_size=_size(fields["vocabulary_size"], MAX_VOCABULARY),
        )
        proposers = {_text(proposer["name"]): proposer for proposer in self.manifest["proposers"]}
        if len(proposers) != len(self.manifest["proposers"]) or len(proposers) > MAX_EXITS + 2:
            raise Corrupt("the router has duplicate proposers or too many")
        lookup, ngrams = proposers.pop(PROMPT_LOOKUP, None), proposers.pop(NGRAM_TABLE, None)
        table = take_part(self.tensors, NGRAM_TABLE)
        if (ngrams is None) == bool(table):
            raise Corrupt("the router has an n-gram table without its proposer, or the proposer without the table")
        exits = tuple(self._exit(proposer, model) for proposer in proposers.values())
        depths = [layer_exit.depth for layer_exit in exits]
        if depths != sorted(set(depths)):
            raise Corrupt("the router's exits are not ordered by depth")
        heads, is_own = self.heads, self.manifest.get("heads", BLOB) == BLOB
        if heads is not None:
            num_tokens = len(heads.vocabulary)
            if num_tokens != self.manifest["draft_vocabulary"] or int(heads.vocabulary.max()) >= model.vocabulary_size:
                raise Corrupt("the draft vocabulary is not the manifest's, or not one of the model's tokens")
        # Some of another router's heads may be left out.
        if self.tensors or (heads is not None and (not exits or (is_own and heads.by_depth.keys() != set(depths)))):
            raise Corrupt(f"the router holds a head or {len(self.tensors)} tensors that belong to no proposer")
        return Ladder(
            model=model,
            lookup_confidence=TableConfidence.from_json(lookup["confidence"]) if lookup else None,
            ngrams=NgramTable.from_tensors(table, model.vocabulary_size) if table else None,
            ngram_confidence=TableConfidence.from_json(ngrams["confidence"]) if ngrams else None,
            exits=exits,
            draft_vocabulary=heads.vocabulary if heads else None,
            joint_weights=JointWeights.from_json(self.manifest["joint_weights"]),
            heads=heads,
        )

    def _exit(self, proposer: Mapping[str, Any], model: ModelIdentity) -> LayerExit:
        depth = _size(proposer["depth"], model.num_layers - 1, least=0)
        if proposer["name"] != exit_name(depth):
            raise Corrupt(f"proposer {proposer['name']!r} has a depth other than its name says")
        if _size(proposer["head_width"], MAX_HIDDEN_SIZE) != model.hidden_size:
            raise Corrupt(f"the head of proposer {proposer['name']!r} is not as wide as the model's states")
        confidence_width = _size(proposer["confidence_width"], MAX_CONFIDENCE_WIDTH)
        head = self.heads.by_depth.get(depth) if self.heads else None
        sizes = model.hidden_size, _size(proposer["mlp_width"], MAX_MLP_WIDTH)
        if head is None or (head.hidden_size, head.mlp_width) != sizes:
            raise Corrupt(f"the head of proposer {proposer['name']!r} is missing, or not of the manifest's sizes")
        # The meta device allocates nothing, so the manifest's sizes cost no memory before they are checked against the
        # tensors.
        with torch.device("meta"):
            confidence = ConfidenceHead(model.hidden_size, confidence_width)
        _fill(confidence, take_part(self.tensors, f"{proposer['name']}.confidence"))
        agreement = float(proposer["figures"].get("agreement", 0.0))
        if not 0.0 <= agreement <= 1.0:
            raise Corrupt(f"the agreement of proposer {proposer['name']!r} is {agreement}")
        return LayerExit(depth, head, confidence.eval(), agreement)


def _fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    expected = module.state_dict()
    if set(tensors) != set(expected):
        raise Corrupt(f"the tensors of {type(module).__name__} are not those of the format")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float16 or tensor.shape != expected[name].shape:
            raise Corrupt(f"{name} of {type(module).__name__} has the wrong dtype or shape")
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    module.requires_grad_(False)


def _size(value: Any, most: int, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Corrupt(f"a size of the router is {value!r}; it must be in [{least}, {most}]")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1024:
        raise Corrupt("a name in the router's manifest is not a string of at most 1024 characters")
    return value


def take_part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Removes the tensors whose names begin with `prefix` and a dot, and returns them by the rest of their names."""
    names = [name for name in tensors if name.startswith(f"{prefix}.")]
    return {name.removeprefix(f"{prefix}."): tensors.pop(name) for name in names}
