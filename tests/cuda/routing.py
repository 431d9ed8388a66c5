"""Experts that rows are routed to in one run, and the same ones in another.

Rounding moves a router's logits a little. Where two experts are closer than that the other one is
taken, and the row's results are another's: no longer what rounding does to a product. With the
experts of the run without rounding the same gates hold as for models without experts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.backends.cuda import host
from octavo.backends.cuda.device import operations, torch_device

_route = host.route


class Routing:
    """The experts of each call of `route`, in order."""

    def __init__(self) -> None:
        self.taken: list[Tensor] = []

    def record(self, patch: pytest.MonkeyPatch) -> None:
        """Keeps what is taken from now on."""

        def route(
            x: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, *, normalize: bool
        ) -> None:
            _route(x, bias, ids, weights, normalize=normalize)
            self.taken.append(ids.clone())

        patch.setattr(host, "route", route)

    def replay(self, patch: pytest.MonkeyPatch) -> None:
        """Takes the same, with the weights that rounded logits give them."""
        left = iter(self.taken)

        def route(
            x: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, *, normalize: bool
        ) -> None:
            everything = torch.zeros(x.shape[1:], dtype=torch.int32)
            shares, taken = torch.zeros(x.shape[1:]), next(left)
            bias = None if bias is None else bias.cpu()
            _route(x.cpu(), bias, everything, shares, normalize=False)
            ids.copy_(taken)
            weights.copy_(shares.gather(1, taken.long()))
            if normalize:
                weights.div_(weights.sum(1, keepdim=True))

        patch.setattr(operations(torch_device(0)), "route", route)
