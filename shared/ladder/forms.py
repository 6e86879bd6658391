"""The forms of exit heads and the width of routers. Free of torch, so that a service can check a request without loading it."""

from typing import Literal, get_args

HeadForm = Literal["affine", "gated", "fused"]
HEAD_FORMS: tuple[HeadForm, ...] = get_args(HeadForm)
DEFAULT_ROUTER_WIDTH = 128
