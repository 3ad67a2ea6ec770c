"""What frozen towers give, computed once and streamed from disk: `pcmepp train --head-only --cache-tokens DIR`.

- `facts`: what the tokens depend on; a cache is only used for a run with the same facts.
- `store`: the files of a cache, which samples each of them holds, and how large they become.
- `reading`: samples of the shards to batches for the towers, in the workers of the first pass.
- `build`: the first pass. `rows`: the samples of a cache by number. `loader`: the batches of an epoch.
- `data`: the way in for open_clip's training loop.
"""

from .build import Alone, Interrupted, Ranks
from .data import Towers, train_data
from .facts import exists
from .store import check_room, footprint_of, readable_size

__all__ = [
    "Alone",
    "Interrupted",
    "Ranks",
    "Towers",
    "check_room",
    "exists",
    "footprint_of",
    "readable_size",
    "train_data",
]
