"""Alternatives to autopart, run on the coverage benchmark's small models.

    plans       transformers ships a tensor-parallel and a pipeline plan with some configurations
    pipeline    `torch.distributed.pipelining.pipeline()` splits a model at given points: here at its middle layer
    transform   torch's `tensor_parallel_transformation` shards an exported program by a given plan: here the
                one that transformers ships, if any, on two processes

Each result is "right", or the error or difference. All need split points or plans, which autopart chooses itself.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

TOLERANCE = 1e-4  # both compute what the model computes, in float32 where it casts down
NUM_RANKS = 2
RIGHT = "right"
Arguments = Mapping[str, Any]


def peers(model: nn.Module, arguments: Arguments) -> dict[str, Any]:
    """What each of them gives for a call of the model."""
    # use_cache is not an input
    arguments = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    config = getattr(model, "config", None)
    nested = vars(config).values() if config is not None else ()
    parts = [config, *(part for part in nested if hasattr(part, "base_model_tp_plan"))]
    with torch.no_grad():
        expected = tensors(model(**arguments))
    return {
        "tp_plan": any(getattr(part, "base_model_tp_plan", None) for part in parts),
        "pp_plan": any(getattr(part, "base_model_pp_plan", None) for part in parts),
        "pipeline": answer(split_in_two, model, arguments, expected),
        "transform": answer(transformed, model, arguments, expected),
    }


def answer(way: Any, *given: Any) -> str:
    try:
        return way(*given)
    except Exception as error:  # whatever comes is the answer
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0][:150] if text else ''}"


def split_in_two(model: nn.Module, arguments: Arguments, expected: list[Tensor]) -> str:
    """`pipeline()` cut before the middle layer of the longest list of layers, run as two stages one after the other."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    middle = middle_layer(model)
    if middle is None:
        return "no list of layers to cut"
    pipe = pipeline(copy.deepcopy(model), (), dict(arguments), split_spec={middle: SplitPoint.BEGINNING})
    if pipe.num_stages != 2:
        return f"{pipe.num_stages} stages"
    with torch.no_grad():
        return compared(tensors(pipe(**arguments)), expected)


def middle_layer(model: nn.Module) -> str | None:
    lists = [
        (name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1
    ]
    if not lists:
        return None
    name, layers = max(lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))
    return f"{name}.{len(layers) // 2}"


def transformed(model: nn.Module, arguments: Arguments, expected: list[Tensor]) -> str:
    styles = shipped_styles(model)
    if not styles:
        return "no plan is shipped"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (folder, model, dict(arguments), styles, expected), nprocs=NUM_RANKS)
        with open(f"{folder}/answer") as file:
            return file.read()


def shipped_styles(model: nn.Module) -> dict[str, str]:
    """`{linear module: "colwise" or "rowwise"}` of transformers' plan."""
    found: dict[str, str] = {}
    for pattern, style in (getattr(model, "tp_plan", None) or {}).items():
        for name, module in model.named_modules():
            layers = ".".join("*" if part.isdigit() else part for part in name.split("."))
            if isinstance(module, nn.Linear) and pattern in (layers, name) and style in ("colwise", "rowwise"):
                found[name] = style
    return found


def _rank_main(rank: int, folder: str, model: nn.Module, arguments: Any, styles: Any, expected: list[Tensor]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    text = answer(_transform, rank, model, arguments, styles, expected)
    if rank == 0:
        with open(f"{folder}/answer", "w") as file:
            file.write(text)
    dist.destroy_process_group()


def _transform(rank: int, model: nn.Module, arguments: Any, styles: dict[str, str], expected: list[Tensor]) -> str:
    from torch.distributed.tensor.experimental._tp_transform import tensor_parallel_transformation
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    kinds: Any = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    chosen = {name: kinds[style] for name, style in styles.items()}
    answers = []
    for decomposed in (True, False):  # torch's own tests decompose; some programs get further without
        try:
            with torch.no_grad():
                program = torch.export.export(model, (), arguments, strict=False)
                program = program.run_decompositions() if decomposed else program
                found = tensor_parallel_transformation(program, rank, NUM_RANKS, "cpu", chosen)
                answers.append(compared(tensors(found.module()(**arguments)), expected))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}")
    return RIGHT if RIGHT in answers else answers[0]


def tensors(output: Any) -> list[Tensor]:
    flat = torch.utils._pytree.tree_leaves(output)
    return [t for t in flat if isinstance(t, Tensor)]


def compared(found: list[Tensor], expected: list[Tensor]) -> str:
    if [t.shape for t in found] != [t.shape for t in expected]:
        return f"other outputs: {[list(t.shape) for t in found]}"
    pairs = zip(found, expected, strict=True)
    apart = max(
        (float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs if b.numel()), default=0.0
    )
    return RIGHT if apart <= TOLERANCE else f"wrong by {apart:.1g}"
