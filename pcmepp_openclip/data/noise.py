"""Noisy correspondence: samples that get the captions of another one, or captions that change places."""

from .plan import seed_for


def exchange(count: int, ratio: float, seed: int) -> dict[int, int]:
    """Return the samples whose captions are wrong, each with the sample that its captions are taken from.

    The indices 0 .. N - 1 are sorted by a hash of seed and index. The first int(r N) of them form a ring, in which each
    sample gets the captions of the next one. So exactly int(r N) samples, drawn uniformly, have the captions of another
    image, no caption is lost or used twice, and for a given N a larger ratio only adds samples to the wrong ones.

    Arguments:
        count: N.
        ratio: r in [0, 1].
        seed: any whole number; nothing else is random.

    Returns:
        {index: index of the sample whose captions it gets}; empty where int(r N) is below 2.

    Relations: the authors' code shuffles the chosen captions, N counting captions and not images, so that about one
    of them keeps its place. Applied to captions, this function differs from that in this one caption.
    """
    ring = sorted(range(count), key=lambda index: seed_for("noise", seed, index))[: int(ratio * count)]
    return dict(zip(ring, ring[1:] + ring[:1], strict=True)) if len(ring) > 1 else {}
