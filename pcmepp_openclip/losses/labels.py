"""Soft labels: how well image i matches text j, if that is more than whether i = j.

    m_ij = w_i [id_i = id_j] + (1 - w_i) [partner_i = id_j]

One formula for mixed images, whose own text counts w and the partner's 1 - w, and for several captions per image, whose
ids are equal. The matrix follows from one id per text, and is made in chunks of rows like all others.

The true pairs of an image are those with its largest label, and it takes that label to its pseudo-positives: pairs at
least as close as its farthest true pair; texts likewise over images. This is `pseudo_positive_targets` without the
matrix.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .collectives import AllGather, all_reduce


class TruePair(NamedTuple):
    """The farthest true pair of each row, or of each column, of the label matrix.

    Arguments:
        label: the largest label of the row.
        logit: its matching logit.
        key: `Gaussian.keys` of the text for a row, and of the image for a column. Equal keys are ties.
    """

    label: Tensor
    logit: Tensor
    key: Tensor


class LabelledPairs(NamedTuple):
    """The true pairs of labelled pairs, which determine the pseudo-positives.

    Arguments:
        rows, columns: the true pair of each of this rank's images, [n], and of each text of all ranks, [N].
        image_key_n, text_key_N: `Gaussian.keys`.
    """

    rows: TruePair
    columns: TruePair
    image_key_n: Tensor
    text_key_N: Tensor

    def raised(self, y_rN: Tensor, label_rN: Tensor, rows: slice) -> Iterator[Tensor]:
        """Yield the increase of some rows' labels by pseudo-positives, [r, N], by the rows and by the columns."""
        of_rows = TruePair(*(x[rows, None] for x in self.rows))
        for true, key in ((of_rows, self.text_key_N), (self.columns, self.image_key_n[rows, None])):
            is_pseudo_rN = (key == true.key).logical_or_(y_rN >= true.logit)
            yield (true.label - label_rN).mul_(is_pseudo_rN)


class Labels(NamedTuple):
    """The labels of this rank's images with the texts of all ranks.

    Arguments:
        own_id_n, partner_id_n: int64, the ids of the texts that match an image, see `LabelledImages`.
        own_share_n: w of the formula, fp32.
        text_id_N: the ids of all texts.
    """

    own_id_n: Tensor
    partner_id_n: Tensor
    own_share_n: Tensor
    text_id_N: Tensor

    @classmethod
    def gathered(cls, own_id_n: Tensor, partner_id_n: Tensor, own_share_n: Tensor, world_size: int) -> "Labels":
        """Return the labels of this rank, once it knows the ids of the texts of all ranks. Called on every rank."""
        with torch.no_grad():
            text_id_N = AllGather.apply(own_id_n) if world_size > 1 else own_id_n
            return cls(own_id_n, partner_id_n, own_share_n.float(), text_id_N)

    def of(self, rows: slice) -> Tensor:
        """Return m of some of this rank's images with all texts, [r, N]."""
        share_r1 = self.own_share_n[rows, None]
        label_rN = (self.own_id_n[rows, None] == self.text_id_N) * share_r1
        return label_rN.add_((self.partner_id_n[rows, None] == self.text_id_N) * (1 - share_r1))

    @torch.no_grad()
    def true_pairs(
        self, logits: Callable[[slice], Tensor], chunks: Iterable[slice], image_key_n: Tensor, text_key_N: Tensor
    ) -> LabelledPairs:
        """Return the true pairs of all rows and columns. Called on every rank.

        This is one more visit to the matrix, since a column is complete only after all of its rows.

        Arguments:
            logits: a function that returns the matching logits of some rows, [r, N].
            chunks: the rows of this rank, some at a time.
        """
        of_rows: list[TruePair] = []
        columns: TruePair | None = None
        for rows in chunks:
            y_rN, label_rN = logits(rows), self.of(rows)
            of_rows.append(_farthest(y_rN, label_rN, text_key_N))
            part = _farthest(y_rN.T, label_rN.T, image_key_n[rows])
            columns = part if columns is None else _farther(columns, part)
        assert columns is not None
        whole = TruePair(*(torch.cat(parts) for parts in zip(*of_rows, strict=True)))
        return LabelledPairs(whole, _over_ranks(columns), image_key_n, text_key_N)


def _farthest(y_rN: Tensor, label_rN: Tensor, key_N: Tensor) -> TruePair:
    label_r = label_rN.amax(dim=1)
    logit_r, place_r = torch.where(label_rN == label_r[:, None], y_rN, torch.inf).min(dim=1)
    return TruePair(label_r, logit_r, key_N[place_r])


def _farther(a: TruePair, b: TruePair) -> TruePair:
    """Return, for each row, the pair with the larger label or, if these are equal, the farther one."""
    is_b = (b.label > a.label) | ((b.label == a.label) & (b.logit < a.logit))
    return TruePair(*(torch.where(is_b, y, x) for x, y in zip(a, b, strict=True)))


def _over_ranks(columns: TruePair) -> TruePair:
    label_N = all_reduce(columns.label.clone(), "max")
    logit_N = -all_reduce(torch.where(columns.label == label_N, -columns.logit, -torch.inf), "max")
    is_it_N = (columns.label == label_N) & (columns.logit == logit_N)
    key_N = all_reduce(torch.where(is_it_N, columns.key, torch.iinfo(torch.int64).min), "max")
    return TruePair(label_N, logit_N, key_N)
