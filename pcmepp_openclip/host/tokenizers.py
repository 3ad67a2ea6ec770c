"""The ids of open_clip's tokenizers, by what they are for."""

from typing import Any

import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer


def token_ids(tokenizer: Any) -> dict[str, Any]:
    """The arguments of `data.size_augment.TokenIds`; ValueError if nothing can be masked or deleted by these ids.

    CLIP's tokenizer has no mask: the capital letter M stands for it, which no caption has, since they are lower-cased.
    Others have a mask or, where not, an id for what they do not know.
    """
    if isinstance(tokenizer, SimpleTokenizer):
        mask, special, size = tokenizer.encoder["M"], tokenizer.all_special_ids, tokenizer.vocab_size
    elif isinstance(tokenizer, HFTokenizer) and tokenizer.tokenizer_mode != "clips":  # whose last token has its place
        inner = tokenizer.tokenizer
        special, size = inner.all_special_ids, inner.vocab_size
        mask = inner.unk_token_id if inner.mask_token_id is None else inner.mask_token_id
    else:
        mask, special, size = None, [], 0
    if mask is None:
        raise ValueError("its tokenizer has no id that could stand for a masked token.")
    ordinary = sorted(set(range(size)) - set(special))
    pad = int(tokenizer([""])[0, -1])  # an empty text begins with its tokens and ends with padding
    return {"mask": mask, "pad": pad, "special": torch.tensor(special), "ordinary": torch.tensor(ordinary)}
