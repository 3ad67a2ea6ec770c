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

P is the width of a sinusoid, K the number of ranks, U the number of different lengths.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..gaussian import full_precision, mixed_bits

TEMPERATURE = 0.1


class _GRU(nn.RNNBase):
    """A bidirectional nn.GRU of another class: torch.compile breaks its graph at the parameters of an nn.GRU."""

    def __init__(self, width: int, hidden_width: int, device: str | None = None):
        super().__init__("GRU", width, hidden_width, batch_first=True, bidirectional=True, device=device)

    forward = nn.GRU.forward


class GPO(nn.Module):
    """The pooling of features [N, L, D] to one per sample, [N, D], in fp32 under any precision.

    Arguments:
        position_width: P.
        hidden_width: the width of the GRU's states.
    """

    def __init__(self, position_width: int = 32, hidden_width: int = 32):
        super().__init__()
        self.gru = _GRU(position_width, hidden_width)
        self.score = nn.Linear(hidden_width, 1, bias=False)  # a bias would change no weight

    def forward(self, x_NLD: Tensor, valid_NL: Tensor | None = None) -> Tensor:
        """Return the pooled features, [N, D].

        Arguments:
            valid_NL: which features count, at any places, or None for all. A sample without any is pooled to 0.
        """
        with full_precision(x_NLD):
            x_NDL = x_NLD.transpose(1, 2).contiguous()  # sorting along the last dimension takes half the time
            if valid_NL is None:
                weight_NL = self.weights(x_NDL.shape[2]).expand(x_NDL.shape[0], -1)
                sorted_NDL = x_NDL.sort(dim=2, descending=True).values
            else:
                length_N = valid_NL.sum(dim=1)
                weight_NL = self.weights_of(length_N, x_NDL.shape[2])
                sorted_NDL = x_NDL.masked_fill(~valid_NL[:, None], -torch.inf).sort(dim=2, descending=True).values
                sorted_NDL = sorted_NDL.masked_fill(_beyond(length_N, x_NDL.shape[2])[:, None], 0)
            return (sorted_NDL.float() @ weight_NL[..., None]).squeeze(2)

    def weights(self, length: int) -> Tensor:
        """Return the weights of so many ranks, [K]."""
        return self._weight_table(torch.full((1,), length), length).squeeze(0)

    def weights_of(self, length_N: Tensor, longest: int) -> Tensor:
        """Return the weights of samples with so many features, [N, K], which are 0 beyond these."""
        length_N = length_N.clamp(min=1)  # the weights of no features do not matter
        if length_N.is_cpu and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            length_U, place_N = length_N.unique(return_inverse=True)
        else:
            length_U, place_N = torch.arange(1, longest + 1), length_N - 1
        return self._weight_table(length_U, longest)[place_N]

    def _weight_table(self, length_U: Tensor, longest: int) -> Tensor:
        """Return the weights of each length, [U, K]. The lengths are in ascending order and on the CPU."""
        gru = {name: parameter.float() for name, parameter in self.gru.named_parameters()}
        position_KP = self._positions(longest)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            states_UKH = self._step_by_step(gru, position_KP, length_U)
        elif torch.compiler.is_compiling():
            states_UKH = _compiled_states(position_KP, length_U, list(gru.values()))
        elif self.gru.weight_hh_l0.dtype == torch.float32:
            states_UKH = _states(self.gru, position_KP, length_U)
        else:  # there is no GRU in half precision
            states_UKH = _states(lambda packed: functional_call(self.gru, gru, (packed,)), position_KP, length_U)
        forward_UKH, backward_UKH = states_UKH.chunk(2, dim=-1)
        score_UK = F.linear((forward_UKH + backward_UKH) / 2, self.score.weight.float()).squeeze(-1) / TEMPERATURE
        beyond_UK = _beyond(length_U.to(score_UK.device), longest)
        return score_UK.masked_fill(beyond_UK, -torch.inf).softmax(dim=1)

    def _step_by_step(self, gru: dict[str, Tensor], position_KP: Tensor, length_U: Tensor) -> Tensor:
        """Return the states that `_states` returns, computed by many small operations, which torch can export."""
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        forward, backward = [gru[name] for name in names], [gru[f"{name}_reverse"] for name in names]
        samples, length_U = len(length_U), length_U.to(position_KP.device)
        state_UH = position_KP.new_zeros(samples, self.gru.hidden_size)
        states, reverse = [state_UH], [state_UH]
        for position_P in position_KP:
            states.append(torch.gru_cell(position_P.expand(samples, -1), states[-1], *forward))
        for rank, position_P in reversed(list(enumerate(position_KP))):
            state_UH = torch.gru_cell(position_P.expand(samples, -1), reverse[-1], *backward)
            reverse.append(state_UH * (rank < length_U)[:, None])  # it starts at the last feature
        return torch.cat([torch.stack(states[1:], dim=1), torch.stack(reverse[:0:-1], dim=1)], dim=-1)

    def _positions(self, length: int) -> Tensor:
        """Return the sinusoids of the ranks, [K, P]: sine in the even channels, cosine in the odd ones."""
        width, device = self.gru.input_size, self.score.weight.device
        frequency = 10000 ** (-torch.arange(0, width, 2, device=device) / width)
        angle = torch.arange(length, device=device)[:, None] * frequency
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def _beyond(length_N: Tensor, longest: int) -> Tensor:
    """Return which ranks samples of these lengths do not have, [N, K]."""
    return torch.arange(longest, device=length_N.device) >= length_N[:, None]


def _states(gru: Callable[[PackedSequence], Any], position_KP: Tensor, length_U: Tensor) -> Tensor:
    """Return the states of a GRU for each length and rank, [U, K, 2 H]: forward, then backward."""
    position_UKP = position_KP.expand(len(length_U), -1, -1)
    packed = pack_padded_sequence(position_UKP, length_U.flip(0), batch_first=True)  # descending, as it wants them
    out, _ = gru(packed)
    return pad_packed_sequence(out, batch_first=True, total_length=len(position_KP))[0].flip(0)


# torch.compile cannot trace a GRU. The states and their gradients are operators to it, so that the model is one graph.


def _states_of_weights(position_KP: Tensor, length_U: Tensor, weights: list[Tensor]) -> Tensor:
    """Return `_states` of the GRU with these parameters, in the order of `named_parameters`."""
    gru = _GRU(position_KP.shape[1], weights[1].shape[1], device="meta")
    named = dict(zip(dict(gru.named_parameters()), weights, strict=True))
    return _states(lambda packed: functional_call(gru, named, (packed,)), position_KP, length_U)


@torch.library.custom_op("pcmepp::gru_states", mutates_args=())
def _compiled_states(position_KP: Tensor, length_U: Tensor, weights: list[Tensor]) -> Tensor:
    return _states_of_weights(position_KP, length_U, weights).contiguous()


@_compiled_states.register_fake
def _(position_KP: Tensor, length_U: Tensor, weights: list[Tensor]) -> Tensor:
    return position_KP.new_empty(len(length_U), len(position_KP), 2 * weights[1].shape[1])


# This is no custom_op, whose body would run without autograd.
torch.library.define("pcmepp::gru_gradients", "(Tensor grad, Tensor position, Tensor length, Tensor[] w) -> Tensor[]")


@torch.library.impl("pcmepp::gru_gradients", "CompositeExplicitAutograd")
def _gradients(grad_UKH: Tensor, position_KP: Tensor, length_U: Tensor, weights: list[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        weights = [weight.detach().requires_grad_() for weight in weights]
        return list(torch.autograd.grad(_states_of_weights(position_KP, length_U, weights), weights, grad_UKH))


@torch.library.register_fake("pcmepp::gru_gradients")
def _(grad_UKH: Tensor, position_KP: Tensor, length_U: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(weight) for weight in weights]


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], *inputs[2])


def _backward(ctx: Any, grad_UKH: Tensor) -> tuple:
    position_KP, length_U, *weights = ctx.saved_tensors
    return None, None, torch.ops.pcmepp.gru_gradients(grad_UKH, position_KP, length_U, weights)


_compiled_states.register_autograd(_backward, setup_context=_keep)


def new_bias(value: float | None, embed_dim: int) -> nn.Parameter | None:
    return None if value is None else nn.Parameter(torch.full((embed_dim,), float(value)))


class TokenPool(nn.Module):
    """The pooling of tokens [N, L, C] to embeddings [N, D]: each token is projected, and GPO pools the projections.

    The bias is added after the pooling, which is the same since the weights sum to 1: in fp32, while the projection
    of all tokens is in the precision of the tower. A log-variance is about as large as its bias, and would only be
    right to 3 % in bf16.

    Arguments:
        width: C.
        embed_dim: D.
        bias: the initial value of the bias, or None for no bias.
    """

    def __init__(self, width: int, embed_dim: int, bias: float | None):
        super().__init__()
        self.proj = nn.Linear(width, embed_dim, bias=False)
        nn.init.xavier_uniform_(self.proj.weight)
        self.bias = new_bias(bias, embed_dim)
        self.gpo = GPO()

    def forward(self, x_NLC: Tensor, valid_NL: Tensor | None = None) -> Tensor:
        """Return the embeddings, [N, D], fp32; `valid_NL` as in `GPO`."""
        pooled_ND = self.gpo(self.proj(x_NLC), valid_NL)
        return pooled_ND if self.bias is None else pooled_ND + self.bias.float()


def kept_tokens(seed_N: Tensor, length: int, p: float) -> Tensor:
    """Return which tokens GPO sees in training, [N, L] of booleans, so that it learns to pool other lengths
    (SizeAugment of VSE-infinity); at least one of every sample. All tokens are alike, CLS too.

    For each sample r ~ U(0, 1). It keeps all tokens if r <= p; else each of them is dropped with probability p r. With
    the paper's p of 0.2, 80 % of the images lose 12 % of their tokens on average.

    The draws are a hash of the seed and the index of a token: the same in each forward pass of a step, on any device.

    Arguments:
        seed_N: int64, one per sample.
        length: L.
        p: in [0, 1).
    """
    index_L = torch.arange(1, length + 2, device=seed_N.device)  # the first draw is r; 0 stays 0 when mixed
    bits_NL = mixed_bits(mixed_bits(seed_N)[:, None] + mixed_bits(index_L))
    uniform_NL = ((bits_NL >> 20) & (2**24 - 1)).float() / 2**24  # 24 bits are exact in fp32
    r_N1, draw_NL = uniform_NL[:, :1], uniform_NL[:, 1:]
    kept_NL = (r_N1 <= p) | (draw_NL >= p * r_N1)
    return kept_NL | ~kept_NL.any(dim=1, keepdim=True)
