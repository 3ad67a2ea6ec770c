"""SizeAugment of captions: some of their tokens are masked, replaced or deleted.

Each token between the first and the last special token, with a probability p:

    50 %    becomes the mask
    10 %    becomes a random ordinary token
    40 %    is deleted: the rest moves up, and padding is added at the end
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MASKED, REPLACED = 0.5, 0.1  # of the tokens that are changed; the others are deleted


class TokenIds(NamedTuple):
    """The ids of a tokenizer, by what they are for.

    Arguments:
        mask: the id that stands for a masked token.
        pad: the padding at the end of a text. CLIP's is also the id of an ordinary token.
        special: ids that stay as they are, such as SOT and EOT.
        ordinary: ids that may replace another.
    """

    mask: int
    pad: int
    special: Tensor
    ordinary: Tensor


def augment_captions(text_NL: Tensor, p: float, ids: TokenIds, rng: np.random.Generator) -> Tensor:
    """Token ids [N, L] to augmented ones of the same shape; the input stays as it is."""
    is_text_NL = (text_NL != ids.pad).flip(1).cummax(dim=1).values.flip(1)  # not of the padding at the end
    draw_NL = torch.from_numpy(rng.random(text_NL.shape))
    random_NL = ids.ordinary[torch.from_numpy(rng.integers(len(ids.ordinary), size=text_NL.shape))]
    changed_NL = is_text_NL & ~torch.isin(text_NL, ids.special) & (draw_NL < p)
    out_NL = text_NL.masked_fill(changed_NL & (draw_NL < p * MASKED), ids.mask)
    is_replaced_NL = changed_NL & (draw_NL >= p * MASKED) & (draw_NL < p * (MASKED + REPLACED))
    out_NL = torch.where(is_replaced_NL, random_NL, out_NL)
    is_deleted_NL = changed_NL & (draw_NL >= p * (MASKED + REPLACED))
    order_NL = is_deleted_NL.byte().argsort(dim=1, stable=True)
    return out_NL.masked_fill(is_deleted_NL, ids.pad).gather(1, order_NL)
