"""The generalized pooling operator of VSE-infinity (GPO; Chen et al., CVPR 2021): learned weights for sorted features.

Each channel of a sample's features is sorted in descending order, and the weight of rank k among l features pools it.
Equal weights are the average, a weight of 1 for the first rank is the maximum:

    pooled_d = sum_k w_k(l) f_(k)d        f_(1)d >= f_(2)d >= ... >= f_(l)d

    w(l) = softmax_k(s_k / 0.1)           s_k = v . (forward_k + backward_k) / 2

where forward and backward are the states of a GRU that reads the ranks 1 to l, as sinusoids, in both directions.

The weights depend on the number of features and on nothing else of a sample. So the GRU reads one sequence per length,
not one per sample: a single one where all samples have the same number, as images do, and else one for each length that
occurs. On a GPU it is one for every length up to the longest: to know which ones occur, the GPU would have to be waited
for, and more sequences take it no more steps.

P is the width of a sinusoid, K the number of ranks, U that of different lengths.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..gaussian import full_precision
from .branch import new_bias

TEMPERATURE = 0.1


class GPO(nn.Module):
    """Features [N, L, D] to one per sample, [N, D], in fp32 under any precision.

    Arguments:
        position_width: P.
        hidden_width: of the GRU's states.
    """

    def __init__(self, position_width: int = 32, hidden_width: int = 32):
        super().__init__()
        self.gru = nn.GRU(position_width, hidden_width, batch_first=True, bidirectional=True)
        self.score = nn.Linear(hidden_width, 1, bias=False)  # a bias would change no weight

    def forward(self, x_NLD: Tensor, valid_NL: Tensor | None = None) -> Tensor:
        """The pooled features, [N, D].

        Arguments:
            valid_NL: which features count, at any places, or None for all. A sample without any is pooled to 0.
        """
        with full_precision(x_NLD):
            x_NDL = x_NLD.transpose(1, 2).contiguous()  # sorting along the last dimension takes half the time
            if valid_NL is None:
                weight_NL = self.weights(x_NDL.shape[2]).expand(x_NDL.shape[0], -1)
                sorted_NDL = x_NDL.sort(dim=2, descending=True).values
            else:
                weight_NL, beyond_NL = self._weights_of(valid_NL.sum(dim=1), x_NDL.shape[2])
                sorted_NDL = x_NDL.masked_fill(~valid_NL[:, None], -torch.inf).sort(dim=2, descending=True).values
                sorted_NDL = sorted_NDL.masked_fill(beyond_NL[:, None], 0)
            return (sorted_NDL.float() @ weight_NL[..., None]).squeeze(2)

    def weights(self, length: int) -> Tensor:
        """The weights of so many ranks, [K]."""
        return self._softmax(self._run(self._positions(length)[None])).squeeze(0)

    def weight_table(self, length_U: Tensor, longest: int) -> Tensor:
        """The weights of each length, [U, K]: zeros from that length to the longest.

        Arguments:
            length_U: in ascending order, on the CPU.
            longest: K.
        """
        descending_U = length_U.flip(0)  # as packing takes them
        position_UKP = self._positions(longest).expand(len(length_U), -1, -1)
        packed = self._run(pack_padded_sequence(position_UKP, descending_U, batch_first=True))
        state_UKH, _ = pad_packed_sequence(packed, batch_first=True, total_length=longest)
        return self._softmax(state_UKH.flip(0), _beyond(length_U.to(state_UKH.device), longest))

    def _weights_of(self, length_N: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """The weights of samples with so many features, [N, K], and which ranks are beyond their features."""
        at_least_1_N = length_N.clamp(min=1)  # the weights of no features do not matter
        known = length_N.is_cpu and not torch.compiler.is_compiling()
        length_U = at_least_1_N.unique() if known else torch.arange(1, longest + 1)
        place_N = torch.searchsorted(length_U.to(length_N.device), at_least_1_N)
        return self.weight_table(length_U, longest)[place_N], _beyond(length_N, longest)

    def _run(self, ranks: Any) -> Any:
        """What the GRU makes of sequences, with its parameters in fp32 also where the model is in half precision."""
        if self.gru.weight_hh_l0.dtype == torch.float32:
            return self.gru(ranks)[0]
        return functional_call(self.gru, {name: x.float() for name, x in self.gru.named_parameters()}, (ranks,))[0]

    def _softmax(self, state: Tensor, padding: Tensor | None = None) -> Tensor:
        """States [..., K, 2 H] to weights [..., K]."""
        forward, backward = state.chunk(2, dim=-1)
        score = F.linear((forward + backward) / 2, self.score.weight.float()).squeeze(-1) / TEMPERATURE
        return (score if padding is None else score.masked_fill(padding, -torch.inf)).softmax(dim=-1)

    def _positions(self, length: int) -> Tensor:
        """Sinusoids of the ranks, [K, P]: sine in the even channels, cosine in the odd ones."""
        width, device = self.gru.input_size, self.gru.weight_hh_l0.device
        frequency = 10000 ** (-torch.arange(0, width, 2, device=device) / width)
        angle = torch.arange(length, device=device)[:, None] * frequency
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def _beyond(length_N: Tensor, longest: int) -> Tensor:
    """Which ranks samples of these lengths do not have, [N, K]."""
    return torch.arange(longest, device=length_N.device) >= length_N[:, None]


class TokenPool(nn.Module):
    """Tokens [N, L, C] to embeddings [N, D]: each token is projected, and GPO pools the projections.

    The bias is added after the pooling, where it is the same, since the weights sum to 1: in fp32, while the projection
    of all tokens is in the precision of the tower. A log-variance is about as large as its bias, and would only be
    right to 3 % in bf16.

    Arguments:
        width: C.
        embed_dim: D.
        bias: initial value of the bias, or None for none.
    """

    def __init__(self, width: int, embed_dim: int, bias: float | None):
        super().__init__()
        self.proj = nn.Linear(width, embed_dim, bias=False)
        nn.init.xavier_uniform_(self.proj.weight)
        self.bias = new_bias(bias, embed_dim)
        self.gpo = GPO()

    def forward(self, x_NLC: Tensor, valid_NL: Tensor | None = None) -> Tensor:
        """The embeddings, [N, D], fp32; `valid_NL` as in `GPO`."""
        pooled_ND = self.gpo(self.proj(x_NLC), valid_NL)
        return pooled_ND if self.bias is None else pooled_ND + self.bias.float()
