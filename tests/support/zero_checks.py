"""Training with ZeRO, compared with one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import zoo
from process_checks import same_grads, same_own_loop
from torch import nn

import autopart
from autopart.ir.mesh import Mesh


def trains(build: str, mesh: str, options: dict[str, Any]) -> None:
    model, batch = zoo.ZOO[build](**({"num_layers": 1} if build == "t5" else {}))
    _, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, **options)
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    same_grads(pm, grads)
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")  # what was gathered before is not read again
    same_grads(pm, grads, 2)
    if Mesh.parse(mesh).size("pp") == 1 and not options["compile"]:
        same_own_loop(pm, batch, grads)
    pm.zero_grad()
    _same_weights(pm, model, batch)


def _same_weights(pm: Any, model: nn.Module, batch: dict[str, Any]) -> None:
    """After three AdamW steps with clipping."""
    options = {"lr": 1e-2, "weight_decay": 0.1}
    ours, theirs = torch.optim.AdamW(pm.parameters(), **options), torch.optim.AdamW(model.parameters(), **options)
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        pm.step(**batch)
        out = model(**batch, **zoo.no_cache(model))
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        zoo.assert_close_outputs(pm.clip_grad_norm_(0.1), norm, where="norm")
        ours.step()
        theirs.step()
    found = pm.full_state_dict()
    for name, value in model.state_dict().items():
        zoo.assert_close_outputs(found[name], value, where=name)
