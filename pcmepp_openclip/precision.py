"""fp32 where it matters, whatever autocast is on."""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager:
    """No autocast on the device of `x` while it lasts."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()
