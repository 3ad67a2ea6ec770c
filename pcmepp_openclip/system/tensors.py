"""Names for tensors by their content."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def fingerprint(tensors: Mapping[str, Tensor], facts: Any) -> str:
    """Return the SHA-256 of the content of tensors and of the `facts` that go with them, which JSON can hold."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
