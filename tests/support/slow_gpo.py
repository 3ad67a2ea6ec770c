"""GPO as its definition says it: one sample, one rank and one channel at a time."""

import math

import torch


def slow_weights(gpo, length: int) -> torch.Tensor:
    """The weights of so many ranks, [K], by the equations of a GRU."""
    width = gpo.gru.weight_ih_l0.shape[1]
    ranks = []
    for rank in range(length):
        angles = [rank / 10000 ** (2 * i / width) for i in range(width // 2)]
        ranks.append(torch.tensor([f(angle) for angle in angles for f in (math.sin, math.cos)]).to(gpo.score.weight))
    forward, backward = run_gru(gpo.gru, ranks, ""), run_gru(gpo.gru, ranks[::-1], "_reverse")[::-1]
    scores = [gpo.score.weight[0] @ ((f + b) / 2) for f, b in zip(forward, backward, strict=True)]
    return (torch.stack(scores) / 0.1).softmax(dim=0)


def run_gru(gru, inputs, suffix: str) -> list[torch.Tensor]:
    """The states of one direction."""
    weight_i, weight_h, bias_i, bias_h = (
        getattr(gru, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    states, state = [], torch.zeros_like(bias_h[: len(bias_h) // 3])
    for x in inputs:
        reset_i, update_i, new_i = (weight_i @ x + bias_i).chunk(3)
        reset_h, update_h, new_h = (weight_h @ state + bias_h).chunk(3)
        update = (update_i + update_h).sigmoid()
        new = (new_i + (reset_i + reset_h).sigmoid() * new_h).tanh()
        state = (1 - update) * new + update * state
        states.append(state)
    return states


def slow_gpo(gpo, x_LD: torch.Tensor) -> torch.Tensor:
    """The pooled features of one sample, all of which count, [D]."""
    weights = slow_weights(gpo, len(x_LD))
    return torch.stack([(channel.sort(descending=True).values * weights).sum() for channel in x_LD.T])


def slow_token_pool(pool, x_NLC, valid_NL=None) -> torch.Tensor:
    """Linear layer with its bias, then GPO, of the tokens that count of each sample, [N, D]."""
    valid_NL = torch.ones(x_NLC.shape[:2], dtype=torch.bool) if valid_NL is None else valid_NL
    bias = 0 if pool.bias is None else pool.bias
    projected = [x_LC[valid_L] @ pool.proj.weight.T + bias for x_LC, valid_L in zip(x_NLC, valid_NL, strict=True)]
    return torch.stack([slow_gpo(pool.gpo, x_LD) for x_LD in projected])
