"""The kernels, bytes of memory and collectives of a computation on fake tensors."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pcmepp_openclip.forecast.counts import Collective, collective_of, touched_bytes

FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")
FILLS = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_")  # read nothing


class Traffic(TorchDispatchMode):
    """Counts while it is entered, on fake tensors and within `fake_ranks`.

        >>> with fake_ranks(64), fake_cuda(), Traffic() as traffic:
        ...     loss(**features).backward()
        >>> [each.kind for each in traffic.collectives]

    Attributes:
        kernels: operators that compute; views and allocations launch nothing. Some operators launch several kernels.
        bytes: of the inputs and outputs of these operators, each read or written once; caches are not considered.
        collectives: in the order of their calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if collective := collective_of(func, args):
            self.collectives.append(collective)
        elif func.namespace == "aten" and not func.is_view and name not in FREE:
            self.kernels += 1
            self.bytes += touched_bytes(out) + (0 if name in FILLS else touched_bytes(args))
        return out

    def sent(self, ranks: int) -> int:
        """Return the bytes that a rank sends, see `Collective.sent`."""
        return sum(each.sent(ranks) for each in self.collectives)
