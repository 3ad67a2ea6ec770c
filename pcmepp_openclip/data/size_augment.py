"""Augmentations of token ids: SizeAugment, which masks, replaces or deletes some tokens, and captions cut to a part.

SizeAugment changes each token between the first and the last special token, with a probability p:

    50 %    becomes the mask
    10 %    becomes a random ordinary token
    40 %    is deleted: the rest moves up, and padding is added at the end
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MASKED, REPLACED = 0.5, 0.1  # shares of the changed tokens; the others are deleted


class TokenIds(NamedTuple):
    """The ids of a tokenizer, by their use.

    Arguments:
        mask: the id that stands for a masked token.
        pad: the padding at the end of a text. CLIP's is also the id of an ordinary token.
        special: the ids that stay as they are, such as SOT and EOT.
        ordinary: the ids that may replace another.
    """

    mask: int
    pad: int
    special: Tensor
    ordinary: Tensor


def augment_captions(text_NL: Tensor, p: float, ids: TokenIds, rng: np.random.Generator) -> Tensor:
    """Return augmented token ids [N, L] of the same shape. The input stays as it is."""
    is_text_NL = _is_text(text_NL, ids.pad)
    draw_NL = torch.from_numpy(rng.random(text_NL.shape))
    random_NL = ids.ordinary[torch.from_numpy(rng.integers(len(ids.ordinary), size=text_NL.shape))]
    changed_NL = is_text_NL & ~torch.isin(text_NL, ids.special) & (draw_NL < p)
    out_NL = text_NL.masked_fill(changed_NL & (draw_NL < p * MASKED), ids.mask)
    is_replaced_NL = changed_NL & (draw_NL >= p * MASKED) & (draw_NL < p * (MASKED + REPLACED))
    out_NL = torch.where(is_replaced_NL, random_NL, out_NL)
    return _deleted(out_NL, changed_NL & (draw_NL >= p * (MASKED + REPLACED)), ids.pad)


def cut_captions(text_NL: Tensor, p: float | Tensor, ids: TokenIds, rng: np.random.Generator) -> Tensor:
    """Return token ids [N, L] in which each caption is cut with probability `p` to a random run of its tokens.

    The length of the run is uniform between one token and all of them, and so is its place. Special tokens stay.

    Arguments:
        p: one number for all, or [N].
    """
    is_cut_N, length_N, start_N = torch.from_numpy(rng.random((3, len(text_NL))))
    is_word_NL = _is_text(text_NL, ids.pad) & ~torch.isin(text_NL, ids.special)
    words_N = is_word_NL.sum(dim=1)
    kept_N = (length_N * words_N).long() + 1
    first_N = (start_N * (words_N - kept_N + 1)).long()
    place_NL = is_word_NL.cumsum(dim=1) - 1 - first_N[:, None]
    is_outside_NL = (place_NL < 0) | (place_NL >= kept_N[:, None])
    return _deleted(text_NL, is_word_NL & is_outside_NL & (is_cut_N < p)[:, None], ids.pad)


def _is_text(text_NL: Tensor, pad: int) -> Tensor:
    """Return whether each token lies before the padding at the end."""
    return (text_NL != pad).flip(1).cummax(dim=1).values.flip(1)


def _deleted(text_NL: Tensor, is_deleted_NL: Tensor, pad: int) -> Tensor:
    """Return the texts without some of their tokens: the rest moves up, and padding is added at the end."""
    order_NL = is_deleted_NL.byte().argsort(dim=1, stable=True)
    return text_NL.masked_fill(is_deleted_NL, pad).gather(1, order_NL)
