"""What a tower of an open_clip model is to a PCME++ model.

N samples, L tokens, C channels of a tower, D dimensions of an embedding.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .. import seams
from .blocks import Stack, pair


class Tokens(NamedTuple):
    """What a tower makes of a batch, up to where its log-variance branch begins.

    Arguments:
        x_NLC: the tokens, which the branch reads.
        text_NL: the token ids, where the batch is one of texts.
        features: what the tower pools, where that is not `x_NLC`.
        kept_NL: which tokens are pooled, where some are left out on purpose; None for all that count.
    """

    x_NLC: Tensor
    text_NL: Tensor | None = None
    features: Any = None
    kept_NL: Tensor | None = None


class Tower:
    """One tower of an open_clip model. A subclass is a kind of tower and knows its attributes.

    Arguments:
        model: an open_clip model with such a tower.
    """

    parts: ClassVar[tuple[str, ...]] = ()  # attributes of the model that are used, by their path
    # Attributes of the holder: all of the tower but its projection, or pooling.
    backbone: ClassVar[tuple[str, ...]] = ()
    pooling: ClassVar[tuple[str, ...]] = ()  # how the names of the tensors begin that `drop_pooling` removes

    def __init__(self, model: Any):
        self.model = model

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model has a tower of this kind."""
        raise NotImplementedError

    @property
    def holder(self) -> Any:
        """The module that the tensors of the branch are added to."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """C."""
        raise NotImplementedError

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks of the backbone, which follow one another; () where it has no list of them."""
        return ()

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        for name in self.backbone:
            part = getattr(self.holder, name)
            if isinstance(part, nn.Module):
                yield from part.parameters()
            elif part is not None:
                yield part

    def check(self, batch: Any) -> None:
        """ValueError for what a user may pass by mistake."""
        raise NotImplementedError

    def tokens(self, batch: Tensor) -> Tokens:
        """The tokens, or the flattened feature map, that the tower pools."""
        raise NotImplementedError

    def mean(self, tokens: Tokens) -> Tensor:
        """What the tower makes of `tokens`: pooled and projected, [N, D], as open_clip's `encode_...` returns it."""
        raise NotImplementedError

    def valid(self, tokens: Tokens) -> Tensor | None:
        """Which tokens count, [N, L] of booleans, or None for all."""
        return None

    # Where the model pools the tokens itself.

    def drop_pooling(self) -> None:
        """Remove the tower's own pooling and projection, which no output depends on then. ValueError if the tower has
        no tokens to pool."""
        raise NotImplementedError

    def normed(self, x_NLC: Tensor) -> Tensor:
        """Tokens of the last block, with the norm that is left of the tower's pooling."""
        return x_NLC

    def lockable(self) -> AbstractContextManager:
        """A context in which open_clip's `lock_image_tower` finds all that it looks for."""
        return contextlib.nullcontext()

    # Of text towers only.

    @property
    def pad_id(self) -> int:
        """The token id of the padding."""
        raise NotImplementedError

    @property
    def may_be_cut(self) -> bool:
        """Whether a text without its padding has the same result."""
        raise NotImplementedError

    def lengths(self, text_NL: Tensor) -> Tensor:
        """How many of the first tokens of a text its log-variance can depend on, [N]."""
        raise NotImplementedError


class ImageTower(Tower):
    """An image tower, which every model has as `visual`."""

    @property
    def holder(self) -> Any:
        return self.model.visual

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the images that it takes, or None for any."""
        height, width = pair(self.model.visual.image_size)
        return height, width

    @property
    def dtype(self) -> torch.dtype:
        """Of the images that it takes."""
        return self.model.visual.conv1.weight.dtype

    def check(self, batch: Any) -> None:
        check_image(batch, self.size, self.dtype)


class SplitTower(Tower):
    """One of open_clip's own transformers: the branch may leave it before its last blocks."""

    projection: ClassVar[str]  # attribute of the holder for the branch's projection, [C, D]
    bias: ClassVar[str]  # and for its bias, [D]
    pools_one_token: bool  # whether the mean depends on a single token of the last block

    @property
    def transformer(self) -> Any:
        raise NotImplementedError

    def stack(self, start: int | None = None, stop: int | None = None) -> Stack:
        """Blocks `start` to `stop`."""
        return Stack.of(self.transformer, start, stop)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.stack().blocks

    @property
    def width(self) -> int:
        return self.transformer.width

    def embed(self, batch: Tensor) -> Tokens:
        """What the first block reads."""
        raise NotImplementedError

    def mask(self, tokens: Tokens) -> Tensor | None:
        """The additive attention mask, [L, L] or [N * H, L, L], or None where every token sees all others."""
        return None

    def token(self, tokens: Tokens) -> "Tensor | Average | None":
        """The index of the token that stands for a sample, [N], or None for the first one of every sample, or
        `AVERAGE`."""
        raise NotImplementedError

    def pool(self, x_NLC: Tensor) -> Tensor:
        """The output of the last block, of all tokens or of the one that stands for a sample, to the mean, [N, D]."""
        raise NotImplementedError

    def tokens(self, batch: Tensor) -> Tokens:
        embedded = self.embed(batch)
        return embedded._replace(x_NLC=self.transformer(embedded.x_NLC, attn_mask=self.mask(embedded)))


class Average:
    """Stands for the mean of all tokens but the first, the one of the class."""


AVERAGE = Average()


def check_image(image: Any, size: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """ValueError for what is not a batch of images.

    Arguments:
        size: height and width, or None where the tower takes any.
        dtype: of the model.
    """
    if not isinstance(image, Tensor):
        raise ValueError(f"An image batch must be a tensor (use the model's preprocessing), not {type(image)}.")
    expected = (3, *size) if size else (3, "height", "width")
    if image.ndim != 4 or image.shape[1] != 3 or (size and tuple(image.shape[2:]) != size):
        raise ValueError(f"An image batch must be [N, {', '.join(map(str, expected))}], not {list(image.shape)}.")
    if not image.is_floating_point():
        raise ValueError(f"An image batch must be of floats (use the model's preprocessing), not {image.dtype}.")
    if image.dtype != dtype and not torch.is_autocast_enabled(image.device.type):
        raise ValueError(f"The image batch is {image.dtype} but the model is {dtype}: cast one of them.")


def check_text(text: Any, length: int | None) -> None:
    """ValueError for what is not a batch of token ids.

    Arguments:
        length: the context length, or None where the tower has none.
    """
    if not isinstance(text, Tensor):
        raise ValueError(f"A text batch must be a tensor of token ids (use the tokenizer), not {type(text)}.")
    if text.ndim != 2 or not 1 <= text.shape[1] <= (length or text.shape[1]):
        limit = f" with L at most {length}" if length else ""
        raise ValueError(f"A text batch must be token ids [N, L]{limit}, not {list(text.shape)}.")
    if text.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"A text batch must be of int32 or int64 token ids (use the tokenizer), not {text.dtype}.")


def check_attributes(model: nn.Module, names: tuple[str, ...]) -> None:
    """ImportError, with the cure, if an open_clip model lacks an attribute that a PCME++ model is built on."""
    for name in names:
        part: Any = model
        for attribute in name.split("."):
            try:
                part = part[0] if attribute == "0" else getattr(part, attribute)
            except AttributeError:
                raise ImportError(seams.lacking(f"attribute {name} of a CLIP", "encode images and texts")) from None
