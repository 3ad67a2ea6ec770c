"""Graphics cards: what their data sheets promise, and what is assumed of it."""

from dataclasses import dataclass

UTILISATION = 0.4  # assumed: the share of the peak that training reaches where the data keep up
CONTEXT = 1.5e9  # bytes, assumed: the CUDA context, cuBLAS, cuDNN and NCCL
FRAGMENTS = 0.1  # assumed: 5 to 10 % of the memory is lost to fragments in the caching allocator
SIZES = (24, 40, 80)  # GB that cards come with


@dataclass(frozen=True)
class Card:
    """Peak TFLOPS of dense matrix products, from its data sheet.

    Arguments:
        half: with 16-bit inputs that are summed in fp32.
        single: with fp32 inputs, which open_clip lets a card round to TF32 where it has that.
        bfloat16: whether it computes in bfloat16; otherwise `half` is of float16 alone.
    """

    name: str
    half: float
    single: float
    bfloat16: bool = True


CARDS = (
    Card("V100", 125, 15.7, bfloat16=False),
    Card("RTX 4090", 165, 82.6),
    Card("A100", 312, 156),
    Card("L40S", 362, 183),
    Card("H100", 989, 494),
)


def room(size: float) -> float:
    """The peak that fits a card of so many bytes, beside the context and the larger share of fragments."""
    return (size - CONTEXT) / (1 + FRAGMENTS)


def samples_per_second(card: Card, flops: float, precision: str) -> float | None:
    """Of one card at the assumed utilisation; None for a precision that it does not have.

    Arguments:
        flops: of a sample.
        precision: a value of --precision.
    """
    if "bf" in precision and not card.bfloat16:
        return None
    return (card.single if precision == "fp32" else card.half) * 1e12 * UTILISATION / flops
