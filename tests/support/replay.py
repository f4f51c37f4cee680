"""Plans and programs of many models on many meshes as text, and what differs between two commits.

    python tests/support/replay.py write FOLDER [--only gpt2]
    python tests/support/replay.py compare [COMMIT]

`compare` (`make replay BASE=COMMIT`) writes them as the commit's code makes them and as this tree's does, and shows the
difference; exit code 1 if there is one. Each case has two files: `.plan.json`, and `.program.txt`, which has the stored
parameters, boundaries and graphs of every stage. Notes and the counts of time and memory are in the plan.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from autopart.ir.facts import facts

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".replay"
"""What commits have made, by their hash."""

MESHES = ("dp2", "tp2", "pp2", "dp2,tp2", "pp2,tp2", "dp2,pp2,tp2")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero": ("dp2,tp2", {"zero": 3}),
    "sequence_parallel": ("tp2", {"sequence_parallel": True}),
    "recompute_full": ("pp2", {"recompute": "full"}),
    "recompute_selective": ("tp2", {"recompute": "selective"}),
    "interleaved": ("pp2,dp2", {"schedule": "interleaved_1f1b", "virtual_stages": 2, "microbatches": 2}),
    "compile": ("dp2,tp2", {"compile": True}),
    "memory": ("dp2,tp2", {"memory": "1GB"}),
    "pins": ("tp2", {"pins": {"*.weight": {"tp": "R"}}}),
    "uneven": ("tp3", {}),
}
"""{name of a case: (mesh, what `autopart.plan` is asked for)}, beside the meshes with nothing asked."""


def models() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    """{name: what builds a model and a batch}."""
    import random_models
    import zoo

    found = dict(zoo.ZOO)
    found |= {f"{build.__name__}_dropout": build for build in (random_models.gpt2, random_models.t5)}
    return found | {"vit": random_models.vit, "batch_norm": batch_norm, "mixtral": mixtral, "adapters": adapters}


def batch_norm() -> tuple[Any, dict[str, Any]]:
    """Buffers that a step writes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(8 * 64, 16))
    return model.double().train(), {"input": torch.randn(8, 3, 8, 8, dtype=torch.float64)}


def mixtral() -> tuple[Any, dict[str, Any]]:
    """Experts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.randint(64, (8, 6))
    return MixtralForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def adapters() -> tuple[Any, dict[str, Any]]:
    """Frozen weights beside trained ones."""
    import zoo

    model, batch = zoo.llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "up_proj" in name)
    return model, batch


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, mesh, options) of every case of a model."""
    yield from ((mesh.replace(",", "-"), mesh, {}) for mesh in MESHES)
    yield from ((f"{mesh.replace(',', '-')}-{name}", mesh, options) for name, (mesh, options) in OPTIONS.items())


# --- Writing


def write(folder: Path, only: str = "") -> None:
    """Writes all cases, the models side by side in processes."""
    names = [name for name in models() if only in name]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for name, number in zip(names, pool.map(write_model, names, [str(folder)] * len(names)), strict=True):
            print(f"{name}: {number} cases", file=sys.stderr)


def write_model(name: str, folder: str) -> int:
    """Writes the cases of one model; how many."""
    import torch

    from autopart.errors import AutopartError
    from autopart.ir.mesh import Mesh
    from autopart.options import Options
    from autopart.plans.pins import Pins
    from autopart.recipe.make_plan import make_plan, prepare
    from autopart.tracing.trace_model import bind_call

    torch.set_num_threads(1)
    model, batch = models()[name]()
    traced = prepare(model, bind_call(model, (), batch))
    place = Path(folder) / name
    place.mkdir(parents=True, exist_ok=True)
    number = 0
    for case, mesh, options in cases():
        if "pins" in options:
            options = {**options, "pins": Pins.parse(options["pins"])}
        try:
            plan = make_plan(model, traced, Mesh.parse(mesh), Options(**options))
        except AutopartError as error:
            (place / f"{case}.error.txt").write_text(f"{type(error).__name__}: {error}\n")
        else:
            (place / f"{case}.plan.json").write_text(plan.to_json())
            (place / f"{case}.program.txt").write_text(program_text(plan.reasons.program))
        number += 1
    return number


def program_text(program: Any) -> str:
    """All of a program but its weights: layouts in their short form, so that the text does not depend on classes."""
    label_count = program.label_count
    if hasattr(label_count, "stage"):
        label_count = f"{label_count.name} of stage {label_count.stage}"
    lines = [
        f"mesh {program.mesh}, microbatches {program.microbatches}, copied {program.copied}, draws {program.draws}",
        f"inputs {', '.join(program.input_names)}; labels {label_count}",
        *(f"output {o.position} {layout_text(o.layout)} {o.constant}" for o in program.outputs),
        *(
            f"stored {p.name} {list(p.shape)} {layout_text(p.layout)} stages {list(p.stages)} "
            f"grad_axes {list(p.grad_axes)} aliases {list(p.aliases)}"
            for p in program.parameters.values()
        ),
    ]
    for stage in program.stages:
        lines += ["", f"== stage {stage.index}"]
        lines += [f"input {i.name} batch_dim {i.batch_dim} sections {list(i.sections)}" for i in stage.inputs]
        for what, boundaries in (("receives", stage.receives), ("sends", stage.sends)):
            lines += [
                f"{what} {b.name} {list(b.shape)} {b.dtype} {layout_text(b.layout)} uneven {list(b.uneven)}"
                for b in boundaries
            ]
        lines += [f"reads {', '.join((*stage.parameters, *stage.buffers))}"]
        lines += [f"updates {u.name} from_inputs {u.from_inputs} {layout_text(u.layout)}" for u in stage.updates]
        for what, graph in (("prologue", stage.prologue), ("graph", stage.graph)):
            lines += ["", f"-- {what}", *map(node_text, graph.graph.nodes)]
    return "\n".join(lines) + "\n"


def layout_text(layout: Any) -> str:
    from autopart.ir.layout import format_layout

    return format_layout(layout)


def node_text(node: Any) -> str:
    layout, region = facts(node).get("layout") or {}, facts(node).get("region")
    notes = [layout_text(layout)] * bool(layout) + [f"region {region}"] * (region is not None)
    return f"{node.format_node()}{'  # ' + ', '.join(notes) if notes else ''}"


# --- Comparing


def compare(commit: str) -> bool:
    """Whether this tree makes what the commit makes. Prints what differs."""
    before, after = CACHE / made_at(commit), CACHE / "now"
    shutil.rmtree(after, ignore_errors=True)
    write(after)
    done = subprocess.run(["git", "diff", "--no-index", "--stat=160", str(before), str(after)], cwd=ROOT)
    if done.returncode:
        print(f"\nin full: git diff --no-index {before.relative_to(ROOT)} {after.relative_to(ROOT)}")
    return done.returncode == 0


def made_at(commit: str) -> str:
    """Writes what the code of a commit makes, unless that was done before; the commit's hash."""
    name = output("git", "rev-parse", "--verify", f"{commit}^{{commit}}")
    if (CACHE / name).exists():
        return name
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        output("git", "worktree", "add", "--detach", str(tree), name)
        try:
            found = list((tree / "tests").rglob("replay.py"))
            if not found:  # this one would look for modules where that commit has none
                sys.exit(f"{commit} has no replay.py among its tests: name a later commit")
            script = found[0]
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(script.parent)])}
            half = CACHE / f"{name}.half"
            subprocess.run([sys.executable, str(script), "write", str(half)], check=True, cwd=tree, env=environ)
            half.rename(CACHE / name)
        finally:
            output("git", "worktree", "remove", "--force", str(tree))
    return name


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--only", default="", help="models whose names have this in them")
    comparing = commands.add_parser("compare")
    comparing.add_argument("commit", nargs="?", default="HEAD")
    asked = parser.parse_args()
    if asked.command == "write":
        write(asked.folder.resolve(), asked.only)
        return 0
    return 0 if compare(asked.commit) else 1


if __name__ == "__main__":
    sys.exit(main())
