"""An operator of your own with a wrong sharding rule, and what `autopart.verify` reports about it."""

import torch
from torch import Tensor, nn

import autopart


@torch.library.custom_op("examples::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


center.register_fake(torch.empty_like)
center.register_autograd(lambda context, grad: center(grad))
autopart.rule("examples::center", "... d -> ... d")  # wrong on purpose: the mean reads all of d, whole="d" is missing


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(center(self.up(x)).relu()).square().mean()


torch.manual_seed(0)
print(autopart.verify(MLP(), "tp2", example_kwargs={"x": torch.randn(8, 16)}, shrink=True))
