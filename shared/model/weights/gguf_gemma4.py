"""What a .gguf file states of Gemma 4: layer by layer, or once for the layers that see a window and once for those that
see everything."""

from collections.abc import Collection
from typing import Any

from shared.errors import UnsupportedModel
from shared.model.weights.files import corrupt
from shared.model.weights.gguf_file import GgufContents
from shared.model.weights.gguf_rope import FREQUENCIES, UNROTATED, Numbers

# The keys, by the part after the architecture, that are read here.
KEYS = frozenset({
    *(f"attention.{name}" for name in ("sliding_window_pattern", "shared_kv_layers", "head_count_kv")),
    *(f"attention.{name}_length{end}" for name in ("key", "value") for end in ("", "_swa")),
    *(f"rope.{name}{end}" for name in ("freq_base", "dimension_count") for end in ("", "_swa")),
    *("feed_forward_length", "embedding_length_per_layer_input"),
})  # fmt: skip


def gemma4_config(contents: GgufContents, numbers: Numbers) -> dict[str, Any]:
    """The arguments of a config that `KEYS` state.

    Raises `Corrupt` (reason MODEL_FILE_CORRUPT) if a statement is missing or of another number of layers, and
    `UnsupportedModel` (FILE_KEY_UNKNOWN) if layers differ as those of transformers cannot.
    """
    stated = _Stated(contents)
    tensors = {entry.name: entry.shape for entry in contents.tensors}
    layers = range(int(stated.one("block_count")))
    sees_window = [bool(value) for value in stated.of_layers("attention.sliding_window_pattern")]
    shared = int(stated.one("attention.shared_kv_layers", 0))
    reads_others = [index >= len(layers) - shared for index in layers]
    key_heads = stated.by_kind("attention.head_count_kv", sees_window)
    inner = stated.by_kind("feed_forward_length", reads_others)
    # Layers without a matrix of values take their keys before rotation.
    has_values = [reads_others[index] or f"blk.{index}.attn_v.weight" in tensors for index in layers]
    takes_keys = not all(has_values)
    fits = {
        "feed_forward_length": inner.get(True, inner[False]) in (inner[False], 2 * inner[False]),
        "attention.head_count_kv": takes_keys or len({*key_heads.values()}) == 1,
        "attention.sliding_window_pattern": not takes_keys or has_values == sees_window,
    }
    for name, is_known in fits.items():
        if not is_known:
            raise stated.unknown(name)
    widths = {end: stated.width(end) for end in ("", "_swa")}
    rows = tensors.get("per_layer_token_embd.weight", ())[:1]
    return {
        **({"vocab_size_per_layer_input": rows[0]} if rows else {}),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sees_window],
        "num_kv_shared_layers": shared,
        "intermediate_size": inner[False],
        "enable_moe_block": bool(stated.one("expert_count", 0)),
        "use_double_wide_mlp": inner.get(True, inner[False]) != inner[False],
        "hidden_size_per_layer_input": int(stated.one("embedding_length_per_layer_input", 0)),
        "num_key_value_heads": key_heads[True],
        "num_global_key_value_heads": key_heads[False],
        "attention_k_eq_v": takes_keys,
        "head_dim": widths["_swa"],
        "global_head_dim": widths[""],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": stated.one("rope.freq_base_swa")},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": stated.one("rope.freq_base"),
                "partial_rotary_factor": _rotated(stated, tensors, numbers),
            },
        },
    }


class _Stated:
    def __init__(self, contents: GgufContents) -> None:
        self._contents = contents
        self._num_layers = int(self.one("block_count"))

    def one(self, name: str, usual: Any = None) -> Any:
        values = self._values(name, usual)
        if len({*values}) != 1:
            raise self.unknown(name)
        return values[0]

    def of_layers(self, name: str) -> list[Any]:
        values = self._values(name, None)
        if len(values) not in (1, self._num_layers):
            raise corrupt(self._contents.path, f"it states {name} for {len(values)} of {self._num_layers} layers")
        return values if len(values) == self._num_layers else values * self._num_layers

    def by_kind(self, name: str, kinds: list[bool]) -> dict[bool, int]:
        """The value of the layers of each kind."""
        found = {*zip(kinds, self.of_layers(name), strict=True)}
        values = {kind: int(value) for kind, value in found}
        if len(found) != len(values):
            raise self.unknown(name)
        return values

    def width(self, end: str) -> int:
        """That of the heads of one kind of layer."""
        width = int(self.one(f"attention.key_length{end}"))
        for name in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            if self.one(name, width) != width:
                raise self.unknown(name)
        return width

    def unknown(self, name: str) -> UnsupportedModel:
        key = f"{self._contents.architecture}.{name}"
        return UnsupportedModel(
            f"the file states {key} in a way that transformers cannot follow",
            reason="FILE_KEY_UNKNOWN",
            metadata={"key": key},
        )

    def _values(self, name: str, usual: Any) -> list[Any]:
        field = self._contents.fields.get(f"{self._contents.architecture}.{name}")
        if field is None and usual is None:
            raise corrupt(self._contents.path, f"its metadata has no {self._contents.architecture}.{name}")
        return [usual] if field is None else list(field.values)


def _rotated(stated: _Stated, tensors: Collection[str], numbers: Numbers) -> float:
    """The share of each head that layers which see everything rotate: pairs behind it have huge factors."""
    if FREQUENCIES not in tensors:
        return 1.0
    factors = numbers(FREQUENCIES)
    rotated = int((factors == 1.0).sum())
    if not ((factors[:rotated] == 1.0).all() and (factors[rotated:] >= UNROTATED).all()):
        raise stated.unknown("rope.dimension_count")
    return float(rotated / len(factors))
