"""Reads .gguf files without repeating work.

Transformers reads a file's metadata, which includes the vocabulary, separately for the configuration, the weights and the tokenizer.
It does so through millions of views into a memory map. It also makes the table of tensor names once per module. Within `read_once` the
reader makes plain arrays, and each of these results is computed once. The loaded model is the same.
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

# `read_once` replaces functions of modules, so for the whole process.
_lock = threading.Lock()


class ArrayReader(gguf.GGUFReader):
    """A GGUFReader whose fields are plain arrays. Views of a memory map take ten times as long, and there are two per token."""

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> np.ndarray:
        kind = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        return np.frombuffer(self.data, kind, int(count), int(offset))


@contextmanager
def read_once() -> Iterator[None]:
    """Within it, transformers parses each file once. One thread at a time can be inside; others wait."""
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
        return copy.deepcopy(parsed(str(path)))  # because callers modify the result

    return (
        (gguf, "GGUFReader", functools.cache(ArrayReader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        (checkpoints, "load_gguf_checkpoint", load),
    )
