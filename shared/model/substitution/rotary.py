"""Replaces transformers' `apply_rotary_pos_emb`, a function of each modelling file, by the rotary kernel.

The function is replaced in the file's module, so for every model of the family in this process. It is replaced only if
the kernel gives the same bits. Calls that the kernel does not support go to the original. Users are counted; the last
one puts the original back.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.model.cache import refuse_if_out_of_memory
from shared.model.substitution.match import Unsuitable, random_input

FUNCTION = "apply_rotary_pos_emb"

_Rotary = Callable[..., Any]
_lock = threading.Lock()
_users: dict[str, int] = {}
_originals: dict[str, _Rotary] = {}
# A finaliser may run at any line of the thread that holds the lock, so it only notes what it releases.
_released: deque[str] = deque()


def has_rotary(file: str) -> bool:
    """Whether the Python module of that name defines the function."""
    return hasattr(sys.modules.get(file), FUNCTION)


def acquire(file: str) -> None:
    """Replaces the function in `file`, or counts one more user.
    Raises `Unsuitable` if the kernel does not give the same bits."""
    try:
        with _lock:
            if file not in _originals:
                original = getattr(sys.modules[file], FUNCTION)
                forms = _forms(original)
                _originals[file] = original
                setattr(
                    sys.modules[file], FUNCTION, _with_kernel(original, forms) if forms else _one_with_kernel(original)
                )
            _users[file] = _users.get(file, 0) + 1
    finally:
        _settle()


def release(file: str) -> None:
    """Undoes one `acquire`. The last one puts the original back. Waits for nothing, so that a finaliser may call it."""
    _released.append(file)
    _settle()


def _settle() -> None:
    """Counts what was released. Whoever holds the lock meanwhile does so once the lock is free."""
    while _released and _lock.acquire(blocking=False):
        try:
            while _released:
                file = _released.popleft()
                _users[file] -= 1
                if _users[file] == 0:
                    setattr(sys.modules[file], FUNCTION, _originals.pop(file))
        finally:
            _lock.release()


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        q.device.type == "cpu"
        and q.dtype == k.dtype == cos.dtype == torch.float32
        and q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[-1] <= q.shape[-1] == k.shape[-1]
        and cos.shape[1] == q.shape[2] == k.shape[2]
        and q.stride(-1) == k.stride(-1) == 1
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
    )


def _with_kernel(original: _Rotary, forms: tuple[_Rotary, ...]) -> _Rotary:
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _fits(*args):
            width, num_angles = args[0].shape[-1], args[2].shape[-1]
            if num_angles == width and _rotate in forms:
                return _rotate(*args)
            if 2 * num_angles == width and _rotate_by_half in forms:
                return _rotate_by_half(*args)
            if num_angles < width and _rotate_first in forms:
                return _rotate_first(*args)
        return original(*args, **kwargs)

    return apply_rotary_pos_emb


def _one_with_kernel(original: _Rotary) -> _Rotary:
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        heads_at = kwargs.get("unsqueeze_dim", 1)
        if len(args) == 3 and kwargs.keys() <= {"unsqueeze_dim"} and heads_at in (1, 2):
            x = args[0] if heads_at == 1 else args[0].transpose(1, 2)
            if _fits(x, x, *args[1:]) and args[1].shape[-1] == x.shape[-1]:
                return _rotate_one(*args, heads_at)
        return original(*args, **kwargs)

    return apply_rotary_pos_emb


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor, heads_at: int) -> Tensor:
    """Rotates one tensor [B, H, Q, D], or [B, Q, H, D] if `heads_at` is 2."""
    turned = x if heads_at == 1 else x.transpose(1, 2)
    rotated, _ = _rotate(turned, turned[:, :0], cos, sin)
    return rotated if heads_at == 1 else rotated.transpose(1, 2)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates by an angle for each number of a head."""
    rotated: tuple[Tensor, Tensor] = torch.ops.neap.rotary.default(q, k, cos, sin)
    return rotated


def _rotate_by_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates by as many angles as a head has pairs of numbers."""
    return _rotate(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))


def _rotate_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates as many numbers of each head as there are angles, and keeps the others."""
    width = cos.shape[-1]
    first_q, first_k = _rotate(q[..., :width], k[..., :width], cos, sin)
    return torch.cat([first_q, q[..., width:]], -1), torch.cat([first_k, k[..., width:]], -1)


# What each form is tried with: batch, heads of queries and of keys, tokens, numbers of a head and angles.
_TRIED = {
    _rotate: ((1, 4, 2, 1, 64, 64), (2, 3, 3, 5, 12, 12)),
    _rotate_by_half: ((1, 4, 2, 1, 64, 32), (2, 3, 3, 5, 12, 6)),
    _rotate_first: ((1, 4, 2, 1, 64, 16), (2, 4, 2, 5, 16, 6)),
}


def _forms(original: _Rotary) -> tuple[_Rotary, ...]:
    """Those that `original` computes, bit for bit; none if it rotates one tensor a call. Raises `Unsuitable` if it is
    none of them either."""
    forms = tuple(
        form for form, sizes in _TRIED.items() if all(_has_same_bits(original, form, *each) for each in sizes)
    )
    if not forms and not _is_of_one_tensor(original):
        raise Unsuitable("is not the half-rotation, bit for bit")
    return forms


def _is_of_one_tensor(original: _Rotary) -> bool:
    """Whether `original` rotates one tensor a call, bit for bit as `_rotate_one`."""
    try:
        for batch, num_heads, _, length, width, _ in _TRIED[_rotate]:
            x = random_input(batch, length, num_heads, width)
            cos, sin = random_input(2, batch, length, width).unbind()
            for heads, states in ((1, x.transpose(1, 2)), (2, x)):
                if not torch.equal(
                    _rotate_one(states, cos, sin, heads), original(states, cos, sin, unsqueeze_dim=heads)
                ):
                    return False
    except Exception as error:
        refuse_if_out_of_memory(error)
        return False
    return True


def _has_same_bits(
    original: _Rotary, form: _Rotary, batch: int, heads: int, kv_heads: int, length: int, width: int, num_angles: int
) -> bool:
    q = random_input(batch, length, heads, width).transpose(1, 2)
    k = random_input(batch, length, kv_heads, width).transpose(1, 2)
    cos, sin = random_input(2, batch, length, num_angles).unbind()
    try:
        return all(map(torch.equal, form(q, k, cos, sin), original(q, k, cos, sin)))
    except Exception as error:
        refuse_if_out_of_memory(error)
        return False
