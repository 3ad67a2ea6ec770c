"""The regression of the uncertainty on the difficulty of a sample: how badly it finds its own partner.

    difficulty_i = log sum_j exp(s cos_ij) - s cos_ii              InfoNCE of the own pair, a constant to the gradient
    loss         = mean_i (log u_i - log(2 / s * difficulty_i))^2  of images, plus that of texts

For a caption that is true of a share p of all images, the difficulty is log(N p) in a batch of N, so that
`s u / 2 = log p + const`: the unit that a tied match scale with k = 1/2 gives to an uncertainty.

When to use it: in place of the matching loss, for the log-variances of a frozen model (`--head-only`) on pairs that it
was not trained on, with images cropped at random. Pairs that a model has memorised are easy for it, and say nothing
about others. On photographs this was the one objective whose variance told vague captions and blurred images from
others, see docs/uncertainty.md.
"""

from torch import Tensor

from .batch import PairBatch

FLOOR = 1e-3  # is added to the target, whose logarithm would have no bound otherwise


def difficulty(batch: PairBatch) -> Tensor:
    """Return this rank's share of the loss, a 0-d tensor. InfoNCE also yields the difficulties, see `fused.py`."""
    total = batch.clip_scale.new_zeros(())
    sides = ((batch.images, batch.pairs.image_difficulty), (batch.texts, batch.pairs.text_difficulty))
    for gaussian, difficulty_n in sides:
        target_n = (2 / batch.clip_scale.detach() * difficulty_n + FLOOR).log()
        total = total + (gaussian.logvar.logsumexp(dim=-1) - target_n).square().mean()
    return total
