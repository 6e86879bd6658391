"""Reading .gguf files without doing the same work again and again.

transformers reads a file's metadata, which holds the vocabulary, anew for the configuration, the weights and the tokenizer, by way of
millions of views into a memory map, and makes the table of tensor names once per module. Within `read_once` the reader makes plain
arrays and each of these results is made once. What is loaded is the same.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import modeling_gguf_pytorch_utils as checkpoints

# What is replaced belongs to the whole process.
_lock = threading.Lock()


class ArrayReader(gguf.GGUFReader):
    """A GGUFReader whose fields are plain arrays: a view of a memory map costs ten times as much, and there are two a token."""

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> np.ndarray:
        kind = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        return np.frombuffer(self.data, kind, int(count), int(offset))


@contextmanager
def read_once() -> Iterator[None]:
    """While it lasts, transformers parses each file once. One thread at a time; others wait."""
    with _lock, ExitStack() as stack:
        for module, name, replacement in _replacements():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        yield


def _replacements() -> Iterable[tuple[Any, str, Callable[..., Any]]]:
    loaded: Any = checkpoints.load_gguf_checkpoint
    parsed = functools.cache(lambda path: loaded(path, return_tensors=False))

    def load(path: str | Path, return_tensors: bool = False, *rest: Any, **options: Any) -> Any:
        if return_tensors or rest or options:
            return loaded(path, return_tensors, *rest, **options)
        return copy.deepcopy(parsed(str(path)))  # callers change it

    return (
        (gguf, "GGUFReader", functools.cache(ArrayReader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        (checkpoints, "load_gguf_checkpoint", load),
    )
