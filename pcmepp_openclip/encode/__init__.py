"""Models and what they encode, on disk and from disk.

`load`: a model by its name. `encode`: images and texts to Gaussians, with `images` (their pixels) and `chunks`.

The output of frozen towers, for `pcmepp train --head-only --cache-tokens DIR`: `tokens` is the way in, `token_facts`
what they depend on, `token_pass` computes them, with `token_reading`, `store` keeps them, `rows` reads them by number,
and `token_loader` has the batches of an epoch.
"""

from .store import check_room, footprint_of, readable_size
from .token_facts import exists
from .token_pass import Alone, Interrupted, Ranks
from .tokens import Towers, train_data

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
