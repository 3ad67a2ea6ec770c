"""The interface of a tower of an open_clip model, as a PCME++ model uses it.

Shapes have N samples, L tokens, C channels of a tower and D dimensions of an embedding.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .blocks import Average, pair


class Tokens(NamedTuple):
    """The tokens that a tower makes of a batch, up to where its log-variance branch begins.

    Arguments:
        x_NLC: the tokens, which the branch reads.
        text_NL: the token ids, for a batch of texts.
        features: the tensors that the tower pools, where these are not `x_NLC`.
        kept_NL: marks the tokens that are pooled, where some are left out on purpose; None for all that count.
    """

    x_NLC: Tensor
    text_NL: Tensor | None = None
    features: Any = None
    kept_NL: Tensor | None = None


class Tower:
    """A tower of an open_clip model. A subclass is a kind of tower and knows its attributes.

    Arguments:
        holder: the module of the tower, to which the tensors of the log-variance branch are added. A kind of tower is
            made from the model and takes it from there.
    """

    # These attributes of the holder are all of the tower but its projection and pooling.
    backbone: ClassVar[tuple[str, ...]] = ()
    pooling: ClassVar[tuple[str, ...]] = ()  # prefixes of the tensors that `drop_pooling` removes
    pad_id: int  # the token id of the padding of texts
    may_be_cut = False  # whether a text without its padding has the same result

    def __init__(self, holder: Any):
        self.holder = holder

    @staticmethod
    def fits(model: Any) -> bool:
        """Return whether the model has a tower of this kind."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Return C, the number of channels of the tower."""
        raise NotImplementedError

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Return the blocks of the backbone in their order, or () where it has no list of them."""
        return ()

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        for name in self.backbone:
            part = getattr(self.holder, name)
            if isinstance(part, nn.Module):
                yield from part.parameters()
            elif part is not None:
                yield part

    def check(self, batch: Any) -> None:
        """Raise ValueError for a batch that this tower cannot take."""
        raise NotImplementedError

    def tokens(self, batch: Tensor) -> Tokens:
        """Return the tokens, or the flattened feature map, that the tower pools."""
        raise NotImplementedError

    def mean(self, tokens: Tokens) -> Tensor:
        """Pool and project `tokens` to [N, D], as open_clip's `encode_...` does."""
        raise NotImplementedError

    def valid(self, tokens: Tokens) -> Tensor | None:
        """Return which tokens count as booleans [N, L], or None for all."""
        return None

    def lengths(self, text_NL: Tensor) -> Tensor:
        """Return [N], the number of first tokens of each text on which its log-variance can depend."""
        raise NotImplementedError

    # These methods are for a model that pools the tokens itself.

    def drop_pooling(self) -> None:
        """Remove the tower's own pooling and projection. Raise ValueError if the tower has no tokens to pool."""
        raise NotImplementedError

    def normed(self, x_NLC: Tensor) -> Tensor:
        """Return the tokens of the last block, after the norm that `drop_pooling` leaves."""
        return x_NLC

    def lockable(self) -> AbstractContextManager:
        """Return a context in which open_clip's `lock_image_tower` finds every attribute that it needs."""
        return contextlib.nullcontext()


class ImageTower(Tower):
    """An image tower, which every model has as `visual`."""

    def __init__(self, model: Any):
        super().__init__(model.visual)

    @property
    def size(self) -> tuple[int, int] | None:
        """Return height and width of the images that the tower takes, or None for any."""
        height, width = pair(self.holder.image_size)
        return height, width

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the images that the tower takes."""
        return self.holder.conv1.weight.dtype

    def check(self, batch: Any) -> None:
        if not isinstance(batch, Tensor):
            raise ValueError(f"An image batch must be a tensor (use the model's preprocessing), not {type(batch)}.")
        size, dtype = self.size, self.dtype
        if batch.ndim != 4 or batch.shape[1] != 3 or (size and tuple(batch.shape[2:]) != size):
            expected = ", ".join(map(str, size or ("height", "width")))
            raise ValueError(f"An image batch must be [N, 3, {expected}], not {list(batch.shape)}.")
        if not batch.is_floating_point():
            raise ValueError(f"An image batch must be of floats (use the model's preprocessing), not {batch.dtype}.")
        if batch.dtype != dtype and not torch.is_autocast_enabled(batch.device.type):
            raise ValueError(f"The image batch is {batch.dtype} but the model is {dtype}: cast one of them.")


class SplitTower(Tower):
    """A transformer of open_clip's own as a tower, which the log-variance branch may leave before its last blocks."""

    projection: ClassVar[str]  # the holder's attribute for the branch's projection, [C, D]
    bias: ClassVar[str]  # the holder's attribute for the branch's bias, [D]

    @property
    def pools_one_token(self) -> bool:
        """Return whether the mean depends on a single token of the last block."""
        return True

    @property
    def transformer(self) -> Any:
        return self.holder.transformer

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.transformer.resblocks

    @property
    def width(self) -> int:
        return self.transformer.width

    def embed(self, batch: Tensor) -> Tokens:
        """Return the tokens that the first block reads."""
        raise NotImplementedError

    def mask(self, tokens: Tokens) -> Tensor | None:
        """Return the additive attention mask, [L, L] or [N * H, L, L], or None where every token sees all others."""
        return None

    def token(self, tokens: Tokens) -> Tensor | Average | None:
        """Return [N], the index of the token that stands for each sample; None if it is the first; or `AVERAGE`."""
        raise NotImplementedError

    def pool(self, x_NLC: Tensor) -> Tensor:
        """Turn the last block's output, of all tokens or of the one that stands for a sample, into the mean [N, D]."""
        raise NotImplementedError

    def tokens(self, batch: Tensor) -> Tokens:
        embedded = self.embed(batch)
        return embedded._replace(x_NLC=self.transformer(embedded.x_NLC, attn_mask=self.mask(embedded)))


def check_text(text: Any, length: int | None) -> None:
    """Raise ValueError unless `text` is a batch of token ids.

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
