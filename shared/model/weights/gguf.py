"""Lets transformers build the model and the tokenizer of a .gguf file, with the matrices left in the file's own format.

Transformers knows the families: how tensors are called, and how a family's *tensor processor* undoes what llama.cpp did
to them, for example to the order of the rows of Llama's queries. In place of a matrix it gets two columns of counting
numbers. If they come out with whole rows moved, or transposed, the same is done to the rows of blocks. A processor that
does anything else gets the weights themselves, and the matrix is dequantised. Matrices of experts, several in one
tensor, may be put one below the other.

Transformers also reads a file's metadata, which includes the vocabulary, several times. Here it is read once.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import modeling_gguf_pytorch_utils as checkpoints

from shared.errors import NeapError, UnsupportedModel
from shared.model.remembered.facts import Facts
from shared.model.weights.composed import InTurn, Joined, Stacked
from shared.model.weights.files import corrupt, parts_of
from shared.model.weights.gguf_config import complete_config, stated_sampling
from shared.model.weights.gguf_experts import Gemma4Processor, GptOssProcessor
from shared.model.weights.gguf_file import Field, GgufContents, GgufTensor, read_contents
from shared.model.weights.gguf_rope import TENSORS as ROPE_TENSORS
from shared.model.weights.gguf_rope import rope_scaling
from shared.model.weights.gguf_tokenizer import end_token_ids, remembered_merges, split_as_the_file_says
from shared.model.weights.lazy import LazyWeight
from shared.model.weights.reading import CheckpointFiles, Replacement, replaced
from shared.model.weights.stored import BLOCK_KINDS, PLAIN_KINDS, Blocks, Plain, Stored

header_reader: Any
try:
    from transformers.integrations.gguf import reader as header_reader
except ImportError:  # an older version of transformers
    header_reader = None

checkpoints.TENSOR_PROCESSORS.setdefault("gpt-oss", GptOssProcessor)
checkpoints.TENSOR_PROCESSORS.setdefault("gemma4", Gemma4Processor)
# Modules of older versions that have `load_gguf_checkpoint` from their import on.
_CALLERS = ("configuration_utils", "tokenization_utils_tokenizers", "models.auto.tokenization_auto")
# Transformers' own.
_load_gguf_checkpoint: Any = checkpoints.load_gguf_checkpoint
_weights_map: Any = checkpoints.get_gguf_hf_weights_map


class GgufReaders:
    """Reads .gguf files for transformers, each once."""

    def __init__(self, checkpoint: CheckpointFiles, facts: Facts | None = None) -> None:
        contents_of = functools.cache(lambda path: read_contents(Path(path), checkpoint.open))
        self._contents_of: Callable[[str], GgufContents] = contents_of
        self.replacements = [*_replacements(checkpoint, contents_of), *remembered_merges(facts or Facts())]

    def complete(self, path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Takes from the file what transformers does not. Raises `UnsupportedModel` (reason TOKENIZER_UNKNOWN)."""
        contents = self._contents_of(str(parts_of(path)[0]))
        split_as_the_file_says(tokenizer, contents)
        generation: Any = model.generation_config
        generation.eos_token_id = end_token_ids(contents) or None
        for name, value in stated_sampling(contents).items():
            setattr(generation, name, value)


def _replacements(checkpoint: CheckpointFiles, contents_of: Callable[[str], GgufContents]) -> list[Replacement]:
    """Make transformers read .gguf files with `GgufModel`."""
    model_of = functools.cache(lambda path: GgufModel(checkpoint, Path(path), contents_of(path)))

    def load(path: str | Path, return_tensors: bool = False, *rest: Any, **options: Any) -> Any:
        model = model_of(str(path))
        if not return_tensors:
            return _copied(model.metadata)  # because callers modify the result
        return model.load(*rest, **options)

    model_names = functools.cache(gguf.get_tensor_name_map)
    replacements: list[Replacement] = [
        (gguf, "get_tensor_name_map", model_names),
        *((module, "load_gguf_checkpoint", load) for module in _holders()),
    ]
    if header_reader is not None:
        replacements += _header_replacements(contents_of)
    return replacements


def _holders() -> list[ModuleType]:
    """The modules of transformers through which `load_gguf_checkpoint` is called."""
    named = [importlib.import_module(f"transformers.{name}") for name in _CALLERS]
    return [checkpoints, *(module for module in named if hasattr(module, "load_gguf_checkpoint"))]


def _copied(value: Any) -> Any:
    """Copies dicts and lists. What a vocabulary consists of, hundreds of thousands of texts and numbers, is not looked
    at one by one."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    return value.copy() if {*map(type, value)} <= {str, int, float} else list(map(_copied, value))


def _header_replacements(contents_of: Callable[[str], GgufContents]) -> list[Replacement]:
    """Transformers' second reader walks the metadata itself. It gets what `read_contents` found."""
    latest: list[GgufContents] = []

    def mapped(path: str) -> np.ndarray:
        latest[:] = [contents_of(str(path))]
        return np.frombuffer(latest[0].header, np.uint8)

    def metadata(_: object, __: object, texts: Any = ()) -> tuple[dict[str, Any], int, int]:
        contents = latest[0]
        values = {key: _plain(field, key in texts) for key, field in contents.fields.items()}
        num_tensors = sum(entry.file.path == contents.path for entry in contents.tensors)
        return values, num_tensors, contents.tensors_at

    return [(header_reader, "_mapped", mapped), (header_reader, "_read_metadata", metadata)]


def _plain(field: Field, with_texts: bool) -> Any:
    """A field as that reader gives it: an array of texts as its length, unless the texts are asked for."""
    if len(field.types) == 1:
        return field.values[0]
    is_text = field.types[1] == gguf.GGUFValueType.STRING
    return len(field.values) if is_text and not with_texts else list(field.values)


class GgufModel:
    """One .gguf file. Raises `Corrupt`, `UnsupportedModel`."""

    def __init__(self, checkpoint: CheckpointFiles, path: Path, contents: GgufContents) -> None:
        self._checkpoint = checkpoint
        self._path = str(path)
        self.contents = contents
        self._entries = {entry.name: entry for entry in self.contents.tensors}
        self._first_rows: dict[str, int] = {}
        self._next_row = 0
        self._read_as_numbers: set[str] = set()
        # What transformers had no place for.
        self._left_out: set[str] = set()
        self._movable = frozenset(
            entry.name
            for entry in self.contents.tensors
            if len(entry.shape) in (2, 3)
            and (entry.kind in PLAIN_KINDS or entry.kind.name in BLOCK_KINDS)
            and not entry.name.endswith(".bias")  # of experts
        )

    @functools.cached_property
    def metadata(self) -> Any:
        """Config and tokenizer, as transformers' `load_gguf_checkpoint` returns them, with all that the file states of
        the model."""
        parsed = self._run(return_tensors=False)
        config: dict[str, Any] = parsed["config"]
        config.pop("rope_scaling", None)  # what transformers makes of it for some families lacks a part
        complete_config(config, self.contents, self._weights)
        if config.keys().isdisjoint(("rope_scaling", "rope_parameters")):
            scaling = rope_scaling(self.contents, self._weights)
            config |= {"rope_scaling": scaling} if scaling else {}
        return parsed

    def load(self, model_to_load: Any = None, torch_dtype: torch.dtype | None = None) -> Any:
        """What `load_gguf_checkpoint` returns with `return_tensors`, with lazy weights among the tensors."""
        self._check_halves()
        try:
            return self._load(model_to_load, torch_dtype)
        except (NeapError, OSError, MemoryError):
            raise
        except Exception:  # from a tensor processor that cannot handle counting numbers
            self._dequantise(self._movable, "the family's tensor processor needs the numbers")
            return self._load(model_to_load, torch_dtype)

    def _check_halves(self) -> None:
        """A parameter of two tensors, gate and up of experts, is made with zeros, and where one is narrow it is spread.
        Raises `Corrupt` if the file has them not both, or in two shapes."""
        shapes = {name: entry.shape for name, entry in self._entries.items()}
        for name, shape in shapes.items():
            for own, other in itertools.permutations((".ffn_gate_exps.", ".ffn_up_exps.")):
                if own in name and shapes.get(beside := name.replace(own, other)) != shape:
                    raise corrupt(Path(self._path), f"it has {name!r} without a {beside!r} of the same shape")

    def _load(self, model_to_load: Any, torch_dtype: torch.dtype | None) -> Any:
        while True:
            parsed = self._run(return_tensors=True, model_to_load=model_to_load)
            if left_out := self._left_out - ROPE_TENSORS:
                raise UnsupportedModel(
                    f"{type(model_to_load).__name__} of transformers has no place for {len(left_out)} tensors of the "
                    f"file, such as {min(left_out)}",
                    reason="TENSORS_LEFT_OUT",
                )
            tensors: dict[str, Tensor] = parsed["tensors"]
            unmoved = set(self._first_rows)
            for name, tensor in tensors.items():
                if tensor.dtype == torch.int64:
                    made = self._stacked(tensor) if tensor.dim() == 3 else self._moved(tensor)
                    if made is not None:
                        tensors[name] = LazyWeight(made[0])
                        unmoved -= made[1]
                elif torch_dtype is not None:
                    tensors[name] = tensor.to(torch_dtype)
            # What transformers does not use does not come out at all.
            is_lost = any("_exps." in name for name in unmoved)  # a part of a parameter whose other part has no counts
            if not is_lost and not any(map(_may_be_counting_numbers, tensors.values())):
                return parsed
            if not unmoved:  # a real tensor with two rows
                return parsed
            self._dequantise(unmoved, "the family's tensor processor does more than move rows")

    def _run(self, **options: Any) -> Any:
        """Transformers' own `load_gguf_checkpoint` over this file's contents."""
        self._first_rows, self._next_row, self._left_out = {}, 0, set()
        replacements: list[Replacement] = [
            (checkpoints, "get_gguf_hf_weights_map", self._weights_map),
            (gguf, "GGUFReader", lambda _: _Reader(self.contents)),
            (gguf, "dequantize", lambda data, _: self._numbers(str(data))),
            (checkpoints, "_gguf_parse_value", lambda value, _: value),
        ]
        with replaced(replacements):
            return _load_gguf_checkpoint(self._path, **options)

    def _numbers(self, name: str) -> np.ndarray:
        """For a matrix that may stay in its format two columns of counting numbers, int64 [N, 2], for several of one
        shape int64 [E, N, 2]; for others the weights, float32."""
        entry = self._entries[name]
        if name in self._movable and name not in self._read_as_numbers:
            self._first_rows[name] = self._next_row
            self._next_row += math.prod(entry.shape[:-1])
            return self._counted(entry)
        if len(entry.shape) > 1 and entry.kind not in PLAIN_KINDS:
            self._checkpoint.dequantised.setdefault(name, f"no kernel reads {entry.kind.name}")
        return self._weights(name)

    def _counted(self, entry: GgufTensor) -> np.ndarray:
        first = 2 * self._first_rows[entry.name]
        return np.arange(first, first + 2 * math.prod(entry.shape[:-1])).reshape(*entry.shape[:-1], 2)

    def _weights(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        data = entry.file.read(entry.offset, entry.num_bytes)
        return _dequantise(data, entry.kind, entry.shape).numpy()

    def _weights_map(self, *args: Any, **options: Any) -> "_NotingNames":
        """As transformers' `get_gguf_hf_weights_map`, which calls itself for each module within a module."""
        return _NotingNames(_weights_map(*args, **options), self._left_out)

    def _entry_of(self, numbers: Tensor) -> GgufTensor:
        """The matrix in whose place `_numbers` gave these numbers."""
        row = int(numbers.min()) // 2
        return self._entries[max((first, name) for name, first in self._first_rows.items() if first <= row)[1]]

    def _stacked(self, numbers: Tensor) -> tuple[Stored, set[str]] | None:
        """The parameter of several matrices that a processor made, of which `numbers` [E, R, 2] are left, [E, 2, R] if
        they are turned, and the names of the file's tensors that it holds. None if it did more than put their rows one
        below the other, or those of two in turn."""
        is_turned = numbers.shape[2] != 2
        rest = numbers.transpose(1, 2) if is_turned else numbers
        if rest.shape[2] != 2:
            return None
        is_in_turn = rest.shape[1] > 1 and int(rest[0, 1, 0] - rest[0, 0, 0]) != 2
        if is_in_turn:
            rest = torch.cat([rest[:, 0::2], rest[:, 1::2]], 1)
        entries: list[GgufTensor] = []
        while rest.numel():
            entry = self._entry_of(rest[:1, :1])
            own = torch.from_numpy(self._counted(entry))
            if own.dim() != 3 or not torch.equal(rest[:, : own.shape[1]], own):
                return None
            entries.append(entry)
            rest = rest[:, own.shape[1] :]
        if is_in_turn and len(entries) != 2:
            return None
        if (
            len({entry.kind in PLAIN_KINDS and entry.kind for entry in entries}) > 1
        ):  # they would be rounded differently
            return None
        names, experts = {entry.name for entry in entries}, list[Stored]()
        for expert in range(len(numbers)):
            parts = [self._stored(entry, None, is_turned, expert) for entry in entries]
            if is_in_turn:
                experts.append(InTurn(parts, f"{'+'.join(sorted(names))}:{expert}", self._checkpoint.matrices))
            else:
                experts.append(parts[0] if len(parts) == 1 else Joined(parts))
        return Stacked(experts), names

    def _moved(self, numbers: Tensor) -> tuple[Stored, set[str]] | None:
        """The parameter that a processor made of a matrix, of which `numbers` are left, and the matrix' name in the
        file. None if it did more than move whole rows."""
        entry = self._entry_of(numbers)
        count = entry.shape[0]
        transposed = numbers.shape == (2, count)
        rows = numbers.T if transposed else numbers
        if rows.shape != (count, 2) or not torch.equal(rows[:, 1], rows[:, 0] + 1):
            return None
        order, odd = rows[:, 0] // 2 - self._first_rows[entry.name], rows[:, 0] % 2
        in_place = torch.arange(count)
        is_in_place = torch.equal(order, in_place)
        if odd.any() or not (is_in_place or torch.equal(order.sort().values, in_place)):
            return None
        return self._stored(entry, None if is_in_place else order, transposed), {entry.name}

    def _stored(self, entry: GgufTensor, row_order: Tensor | None, transposed: bool, number: int = 0) -> Stored:
        """`number`: of the matrix, in a tensor of several."""
        options: dict[str, Any] = {
            "target_dtype": self._checkpoint.dtype,
            "row_order": row_order,
            "transposed": transposed,
            "matrices": self._checkpoint.matrices,
        }
        matrix_bytes = entry.num_bytes // math.prod(entry.shape[:-2])
        place = (entry.file, entry.offset + number * matrix_bytes, (entry.shape[-2], entry.shape[-1]))
        if entry.kind in PLAIN_KINDS:
            return Plain(*place, PLAIN_KINDS[entry.kind], **options)
        return Blocks(*place, entry.kind, **options)

    def _dequantise(self, names: Iterable[str], why: str) -> None:
        self._read_as_numbers |= set(names)
        self._checkpoint.dequantised.update(dict.fromkeys(names, why))


def _dequantise(data: Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a GGUF file, whatever its kind: its bytes `data` [*] uint8 -> float32 [*shape].
    Raises `UnsupportedModel`."""
    if kind in PLAIN_KINDS:
        return data.view(PLAIN_KINDS[kind]).float().view(shape)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows = data.numpy().reshape(-1, shape[-1] // block * block_bytes)
    try:
        numbers = dequantize(rows, kind)
    except NotImplementedError as error:
        raise UnsupportedModel(f"tensors of type {kind.name} cannot be read") from error
    return torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).view(shape)


def _may_be_counting_numbers(tensor: Tensor) -> bool:
    return not isinstance(tensor, LazyWeight) and (
        tensor.dtype == torch.int64 or (tensor.dim() > 1 and 2 in (tensor.shape[0], tensor.shape[-1]))
    )


class _NotingNames(dict[str, str]):
    """The names of parameters by those of tensors. Notes what is asked for and not there."""

    def __init__(self, names: dict[str, str], absent: set[str]) -> None:
        super().__init__(names)
        self._absent = absent

    def __contains__(self, name: object) -> bool:
        is_there = super().__contains__(name)
        if not is_there and isinstance(name, str):  # None: a tensor that a processor has placed itself
            self._absent.add(name)
        return is_there


class _Reader:
    """What transformers uses of `gguf.GGUFReader`. The data of a tensor is its name."""

    def __init__(self, contents: GgufContents) -> None:
        self.fields = {key: _ReaderField(field) for key, field in contents.fields.items()}
        self.tensors = [_ReaderTensor(entry) for entry in contents.tensors]


class _ReaderField:
    """`data` are the places of the values in `parts`.
    A single value is taken out of its list, so an array is given as one."""

    def __init__(self, field: Field) -> None:
        is_array = len(field.values) > 1
        self.parts, self.types = [field.values] if is_array else field.values, field.types
        self.data = range(len(self.parts))


class _ReaderTensor:
    def __init__(self, entry: GgufTensor) -> None:
        self.name, self.data, self.tensor_type = entry.name, entry.name, entry.kind
