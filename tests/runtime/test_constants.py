"""What a prologue makes of no input is made in the first call, and held."""

import torch
import zoo
from torch import Tensor, nn

import autopart
from autopart.runtime.graphs import cached_constants

SEQ, WIDTH = 6, 4


class Places(nn.Module):
    """Returns distances between positions beside what it computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.linear = nn.Embedding(2 * SEQ, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(SEQ)
        distances = places[None] - places[:, None] + SEQ
        return self.linear(x) + self.bias(distances).sum(0), distances


def parallelized():
    torch.manual_seed(0)
    model, x = Places().double(), torch.randn(2, SEQ, WIDTH, dtype=torch.float64)
    return model, x, autopart.parallelize(model, "dp1", example_args=(x,))


def modules(pm):
    return [module for executable in pm._executables.values() for module in executable.modules]


def operators_of(module):
    return [node for node in module.prologue.__self__.graph.nodes if node.op == "call_function"]


def test_positions_are_counted_once():
    model, x, pm = parallelized()
    for _ in range(2):
        torch.testing.assert_close(pm(x), model(x), rtol=1e-12, atol=0)
    (module,) = modules(pm)
    assert [value.shape for value in module.constants.values] == [(SEQ, SEQ)]
    assert operators_of(module) == []


def test_a_result_is_the_users_to_write_on():
    model, x, pm = parallelized()
    pm(x)[1].zero_()
    torch.testing.assert_close(pm(x), model(x), rtol=1e-12, atol=0)


def test_a_first_call_without_gradients():
    model, x, pm = parallelized()
    with torch.inference_mode():
        pm(x)
    pm(x)[0].sum().backward()
    model(x)[0].sum().backward()
    torch.testing.assert_close(pm.full_grads()["bias.weight"], model.bias.weight.grad, rtol=1e-12, atol=0)


def test_what_is_large_is_made_in_each_call(monkeypatch):
    monkeypatch.setattr(cached_constants, "MOST_BYTES", SEQ)
    model, x, pm = parallelized()
    torch.testing.assert_close(pm(x), model(x), rtol=1e-12, atol=0)
    (module,) = modules(pm)
    assert module.constants.values == () and operators_of(module)


def test_what_inputs_decide_is_made_in_each_call():
    model, batch = zoo.bert(num_layers=1)
    pm = autopart.parallelize(model, "dp1", example_kwargs=batch)
    pm.step(**batch)
    other = {**batch, "labels": torch.full_like(batch["labels"], -100).index_fill(1, torch.tensor([1]), 3)}
    torch.testing.assert_close(pm.step(**other), model(**other).loss.detach(), rtol=1e-12, atol=0)
