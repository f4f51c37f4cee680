"""Axes are data: a table with a second axis that cuts rows, and a second that cuts features, is all it takes."""

from __future__ import annotations

import pytest
import zoo
from fuzz import WIDER

import autopart
from autopart.ir.mesh import Mesh


@pytest.mark.whole
@pytest.mark.parametrize("mesh", ["dp2,rows2,tp2", "tp2,feat2"])
@pytest.mark.parametrize("model", [zoo.gpt2, zoo.llama], ids=["gpt2", "llama"])
def test_axes_that_only_the_table_knows_are_exact(model, mesh):
    module, batch = model()
    report = autopart.verify(module, Mesh.parse(mesh, WIDER), example_kwargs=batch)
    assert report.ok, report
