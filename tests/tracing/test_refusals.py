"""docs/refusals.md: every reason for which a model is refused, each with an example that is and one that is not."""

from __future__ import annotations

import random
import re
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopart
from autopart.errors import Refusal, TraceError

PAGE = (Path(__file__).parents[2] / "docs" / "refusals.md").read_text()
SECTIONS = dict(re.findall(r"(?s)\n## [^\n]*\((\w+)\)\n.*?```python\n(.*?)```", PAGE))
TITLES = dict(re.findall(r"\n## ([^\n]*) \((\w+)\)\n", PAGE))


class Base(nn.Module):
    """What the page's examples begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


def classes(refusal: Refusal) -> dict[str, Any]:
    names = {
        "Base": Base,
        "UserDict": UserDict,
        "np": np,
        "nn": nn,
        "random": random,
        "torch": torch,
        "__name__": __name__,
    }
    exec(compile(SECTIONS[refusal.name], f"refusals.md ({refusal.name})", "exec"), names)
    return names


def test_the_page_has_every_reason_and_no_other():
    assert len(Refusal) <= 12
    assert {name: title for title, name in TITLES.items()} == {
        refusal.name: refusal.value[0].upper() + refusal.value[1:] if refusal is not Refusal.NUMPY else refusal.value
        for refusal in Refusal
    }
    assert set(SECTIONS) == {refusal.name for refusal in Refusal}


@pytest.mark.parametrize("refusal", Refusal, ids=lambda refusal: refusal.name)
def test_the_example_is_refused_for_that_reason(refusal):
    model, x = classes(refusal)["Model"](), torch.randn(4, 8)
    assert model(x) is not None, "the model itself runs"
    with pytest.raises(TraceError) as error:
        autopart.plan(model, "dp2", example_args=(x,))
    assert error.value.refusal is refusal, error.value


@pytest.mark.parametrize("refusal", Refusal, ids=lambda refusal: refusal.name)
def test_the_way_out_is_exact(refusal):
    result = autopart.verify(classes(refusal)["Fixed"](), "tp2", example_args=(torch.randn(4, 8),))
    assert result.ok, result
