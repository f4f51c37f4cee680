"""Faults planted one by one, to see whether the tests catch them: `make mutants` patches, runs, and reverts.

Each is one changed place in a copy of the code, and the test files that should notice, run as `make test` runs them. A
fault that no test notices is printed as MISSED, and the exit code is 1.

    python tests/support/mutants.py [--only TEXT] [--workers N]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
TIER = "not large"  # that of `make test`


class Mutant(NamedTuple):
    """A fault: in this file, `before` (which is there once) becomes `after`. `tests`: files that should notice."""

    file: str
    before: str
    after: str
    tests: str


RULES = "rules sharding fuzz"
MUTANTS = [
    # rules
    Mutant("passes/rules/tables.py", '"aten::bmm": Rule("b m k, b k n -> b m n"',
           '"aten::bmm": Rule("b m k, k b n -> b m n"', RULES),
    Mutant("passes/rules/tables.py", 'Rule("... k, n k -> ... n", linear=((0,), (1,))',
           'Rule("... k, n k -> ... n", linear=((0, 1),)', RULES),
    Mutant("passes/rules/tables.py", '"tril triu", Rule("... q k -> ... q k", whole="q k"',
           '"tril triu", Rule("... q k -> ... q k", whole="q"', RULES),
    Mutant("passes/rules/tables.py", 'whole="d k", matmul=_ATTENTION',
           'whole="d", matmul=_ATTENTION', RULES),
    Mutant("passes/rules/tables.py", '"softmax log_softmax", Rule(of_call=reduction_rules.along_dim("dim"),',
           '"softmax log_softmax", Rule(of_call=reduction_rules.along_dim("dim", linear=True),', RULES),
    Mutant("passes/rules/tables.py", "amax amin var std logsumexp\", Rule(of_call=reduction_rules.unsharded_reduction",
           "amax amin var std logsumexp\", Rule(of_call=reduction_rules.reduction", RULES),
    Mutant("passes/rules/operators/concat_rules.py", "dims, at = names_and_dim(node)\n    dims[at] = (\"joined\",)",
           "dims, at = names_and_dim(node)\n    dims[0] = (\"joined\",)", RULES),
    Mutant("passes/rules/operators/norm_rules.py", 'unshardable = frozenset({"r", *(d[0] for d in inner)})',
           'unshardable = frozenset({"r"})', RULES),
    Mutant("passes/rules/operators/indexing_rules.py", 'table_first = operator_name(node) == "aten::searchsorted"',
           "table_first = len(set(inputs)) == 2 and operator_name(node) == 'aten::searchsorted'", RULES),
    Mutant("passes/facts/strategies.py", "unsharded = R if factor == pattern.lookup and pattern.all_reduces else P",
           "unsharded = R if factor == pattern.lookup else P", RULES),
    Mutant("autopart/ir/pattern.py", 'return " -> ".join(map(", ".join, values))',
           'return " => ".join(map(", ".join, values))', RULES + " golden pipeline_passes"),
    # the writer
    Mutant("passes/write/lower.py", "rows = {axis: R_GRAD_P for axis in self.sizes",
           "rows = {axis: R for axis in self.sizes", "exact_lockstep fuzz"),
    Mutant("passes/write/convert_layout.py", "written, 1.0 / self.sizes[axis])", "written, 1.0)",
           "exact_lockstep fuzz"),
    Mutant("passes/write/convert_layout.py", "return full // others", "return full",
           "exact_lockstep fuzz axes"),
    Mutant("autopart/ir/layout.py", "return shard(place.dim, (place.sections[0] // outer,))", "return place",
           "context fuzz"),
    Mutant("passes/choose/solve/nested_shards.py", "(num_sections(place.sections) * parts,)", "place.sections",
           "context fuzz"),
    Mutant("passes/write/convert_layout.py", "outside = [current[a] for a in changing]",
           "outside = []", "axes"),
    Mutant("passes/rules/operators/reduction_rules.py",
           "return None if num_shards == 1 else call.emit(aten.mul.Tensor,",
           "return None if num_shards else call.emit(aten.mul.Tensor,", "rules fuzz exact_lockstep"),
    Mutant("passes/rules/operators/concat_rules.py", "[size // call.num_parts(\"joined\") for size in call.args[1]]",
           "list(call.args[1])", "exact_lockstep fuzz"),
    Mutant("passes/rules/operators/embedding_rules.py",
           "emit(aten.sub.Tensor, logits, emit(aten.unsqueeze.default, peak, -1))",
           "logits", "writer"),
    Mutant("passes/normalize/matmul_forms.py", "and len(product.users) == 1 and", "and len(product.users) >= 1 and",
           "writer"),
    # collectives and shards
    Mutant("autopart/ir/sharding.py", "spans.append((start + sum(lengths[:index]), lengths[index]))",
           "spans.append((start + index * lengths[index], lengths[index]))", "layout runtime_conversions fuzz"),
    Mutant("autopart/ir/sharding.py", "padding = self.longest - shard.size(self.dim)", "padding = 0",
           "runtime_conversions exact_processes"),
    Mutant("runtime/comm/collectives.py", "*reversed(ctx.told))", "*ctx.told)", "runtime_conversions"),
    Mutant("autopart/ops/operators.py", "* is_local.unsqueeze(-1)\n", "\n",
           "collectives exact_processes exact_lockstep"),
    Mutant("autopart/ops/operators.py", "mask = dropout_mask(x.detach(), p, seed, salt, shard)",
           "mask = dropout_mask(x.detach(), p / 2, seed, salt, shard)", "random_fast collectives runtime_conversions"),
    Mutant("runtime/comm/list_collectives.py",
           "return [values[0].clone(), *(torch.zeros_like(value) for value in values[1:])]",
           "return [value.clone() for value in values]", "rules fuzz runtime_conversions"),
    Mutant("autopart/ir/layout.py", '("S", "R(grad P)"): Conversion("all_gather_sum", "all_gather", "reduce_scatter")',
           '("S", "R(grad P)"): Conversion("all_gather_sum", "all_gather", "slice")', "layout rules fuzz"),
    Mutant("runtime/gradients/step_reduction.py",
           "ParamBucket(tensors, AllReduceStrategy(groups, program.reduce_dtype), queue).reduce_accumulated()",
           "pass", "exact_processes exact_features no_sync your_loop local_batch overlap"),
    Mutant("runtime/comm/async_collectives.py", "for group in others:\n            sum_over(group, flat)", "pass",
           "exact_processes exact_features overlap zero_over_axes optimizer_state"),
    Mutant("runtime/gradients/reducer.py", "and self.missing[self.next] <= 0", "and False", "overlap"),
    Mutant("runtime/gradients/reducer.py", "if bucket.each_microbatch or self.is_last:", "if True:",
           "overlap exact_features"),
    Mutant("runtime/gradients/param_bucket.py", "is_owned=False", "is_owned=True", "overlap"),
    Mutant("runtime/gradients/shard_collectives.py", "chunk.add_(prior)", "pass",
           "exact_features overlap precision memory"),
    Mutant("runtime/gradients/shard_collectives.py", "if self.others and earlier is not None:", "if False:",
           "overlap exact_features"),
    Mutant("runtime/gradients/unshard_blocks.py",
           "        self.release_weights()\n        for block", "        for block",
           "zero"),
    Mutant("runtime/gradients/unshard_blocks.py", "for i in range(index - 1, -1, -1)", "for i in range(0)", "overlap"),
    Mutant("runtime/gradients/shard_collectives.py", "grad.narrow(one.cut.dim, begin, count)",
           "grad.narrow(one.cut.dim, 0, count)", "exact_features zero"),
    Mutant("runtime/gradients/param_bucket.py", "return grad if earlier is None else earlier.add_(grad)", "return grad",
           "precision"),
    Mutant("runtime/batch/batch_split.py", "program.mesh.row_index(coordinates) % num_blocks", "0",
           "exact_lockstep axes"),
    Mutant("runtime/training/gradient_norms.py",
           "part.shard_info.is_owner_in_stage if of_one else part.shard_info.is_owner", "True",
           "norms your_loop"),
    Mutant("runtime/training/grad_scaler.py", "value.fill_(infinite)", "pass", "scaler your_loop"),
    Mutant("runtime/consistency/same_call.py", "return not exact and max(others, default=0.0) <= self.given.slack",
           "return True", "agreement"),
    # solver and choices
    Mutant("passes/choose/solve/pairwise_solver.py", "(self.costs[v][:, None] + table).min(0)",
           "(self.costs[v][:, None] + table).max(0)", "sharding"),
    Mutant("passes/choose/solve/pairwise_solver.py", "beats = worse <= 0", "beats = worse <= 1", "sharding"),
    Mutant("passes/choose/solve/pairwise_solver.py", "self.costs[a] = self.costs[a] + np.diagonal(costs)",
           "self.costs[a] = self.costs[a] + costs[0]", "sharding"),
    Mutant("passes/choose/solve/shard_axis.py",
           "sets = {places | wanted for places in sets for wanted in set(use.wanted())}",
           "sets = sets | set(use.wanted())", "sharding expert_plan"),
    Mutant("passes/choose/solve/sharding_costs.py", "moved = gathers * time_s(", "moved = 0.0 * time_s(",
           "zero sharding why"),
    Mutant("passes/choose/solve/sharding_costs.py", "key = place, target, value", "key = place, target, value.role",
           "sharding expert_plan"),
    Mutant("passes/choose/storage/parameter_storage.py", "size % ranks == 0 and dim not in taken", "size % ranks == 0",
           "zero"),
    Mutant("cost/predict/stage_balance.py",
           "heaviest = np.minimum(after, np.maximum(heaviest[previous], end - start[previous]))",
           "heaviest = after", "stages"),
    Mutant("cost/predict/stage_balance.py", "_preceding(self.start - self.send, widest)",
           "_preceding(self.start, widest)", "stages"),
    Mutant("passes/choose/solve/batch_axis.py", '("S", "P", "R(grad P)", "R").index',
           '("R(grad P)", "P", "S", "R").index',
           "exact_lockstep expert_plan golden"),
    # masks of attention
    Mutant("autopart/ops/masked_attention.py", "is_band &= (attended == attended[:1]).all()", "is_band &= True",
           "masks"),
    Mutant("autopart/ops/masked_attention.py", "(queries - before <= keys)", "(queries - before <= keys + 9)", "masks"),
    Mutant("autopart/ops/masked_attention.py", "(attended | (mask <= torch.finfo(mask.dtype).min / 2)).all()",
           "(attended | (mask <= torch.finfo(mask.dtype).min / 2)).any()", "masks"),
    Mutant("autopart/ops/masked_attention.py", "(beside <= at + after) & exists", "(beside <= at + after)", "masks"),
    Mutant("autopart/ops/stage_masks.py", "elif band.before >= queries - 1 and band.after == 0 and queries == keys:",
           "elif band.after == 0 and queries == keys:", "masks"),
    Mutant("autopart/ops/stage_masks.py", "_replace(is_causal=True)", "_replace(is_causal=False)", "masks"),
    Mutant("autopart/ops/stage_masks.py", 'if facts(mask).get("needs_grad"):', "if False:", "masks"),
    Mutant("runtime/graphs/mask_kernels.py", "key = tuple(id(arguments[name]) for name in self.reads)", "key = ()",
           "masks"),
    # schedules and time
    Mutant("autopart/compat/pipelining_internals.py", "self._num_stages - 1 - stage)", "self._num_stages - stage)",
           "schedules timeline memory"),
    Mutant("autopart/ir/run/schedule_actions.py", "a._replace(joined=True)", "a", "schedules timeline simulate"),
    Mutant("cost/predict/collective_costs.py", '"all_reduce": Parts(*(2 * part for part in _one_way))',
           '"all_reduce": _one_way',
           "formula simulate hardware published golden"),
    Mutant("cost/predict/collective_costs.py", "most = max(1, min(num_ranks, devices_per_node // stride))",
           "most = max(1, min(num_ranks, devices_per_node))", "collectives formula simulate hardware published"),
    # memory and cost
    Mutant("autopart/ir/run/schedule_actions.py",
           "size += min(gradients, sum(stages[s].gradients for s in with_gradients))",
           "size += 0",
           "memory schedules"),
    Mutant("cost/predict/comm_buffers.py", "        self.now += flat_bytes + part_bytes\n",
           "        self.now += part_bytes\n", "memory"),
    Mutant("cost/count/symbolic_memory.py",
           "Size.sum([self.others.get(node, NOTHING), *map(self.size, self.saved.get(node, ()))])",
           "Size.sum(map(self.size, self.saved.get(node, ())))", "memory golden one_prediction"),
    Mutant("cost/count/symbolic_memory.py", "ends + further * 2 + kept * -1]", "ends + kept * -1]",
           "memory golden one_prediction"),
    Mutant("cost/predict/table_memory.py", "total += posted * (before * stages[i].received",
           "total += (before * stages[i].received", "memory golden"),
    Mutant("cost/count/saved_tensors.py",
           "with saved_tensors_hooks(keep, lambda held: held.tensor), Allocated() as forward:",
           "with saved_tensors_hooks(lambda t: t, lambda t: t), Allocated() as forward:", "memory"),
    Mutant("cost/predict/operator_work.py", "ranks = self.tp**powers.tp * self.cp**powers.cp * self.ep**powers.ep",
           "ranks = self.cp**powers.cp * self.ep**powers.ep", "formula search simulate one_number"),
    # optimizers of full tensors
    Mutant("runtime/optimizers/owner_exchange.py", "own if index is None or position < level - 1 else index", "own",
           "partitioned_optimizer"),
    Mutant("runtime/optimizers/partitioned_optimizer.py", "            _copy_options(group, inner)", "            pass",
           "partitioned_optimizer"),
    Mutant("runtime/optimizers/full_tensor_update.py", "values[name].copy_(shard)", "values[name].add_(shard)",
           "partitioned_optimizer"),
    # saves
    Mutant("runtime/saves/save_methods.py", "set_random_state(own, process.device, self._compiler.set_random_state)",
           "set_random_state(own, process.device, lambda _: None)", "saves"),
    Mutant("runtime/saves/chunk_storage.py", "len(data) != chunk.length or digest_of(data) != chunk.digest",
           "len(data) != chunk.length", "saves"),
    Mutant("runtime/saves/step_folders.py", "complete_in(final.parent)[:-keep]",
           "complete_in(final.parent)[: -keep - 1]", "saves"),
    Mutant("runtime/saves/step_folders.py", "return complete[-1].path if complete else None",
           "return found[-1].path if found else None", "saves"),
]  # fmt: skip


def copied(folder: Path) -> Path:
    """A copy of the repository's files, its links as they are."""
    target = folder / "autopart_copy"
    skipped = shutil.ignore_patterns(".git", ".venv", ".replay", "__pycache__", ".pytest_cache", ".mypy_cache")
    shutil.copytree(ROOT, target, symlinks=True, ignore=skipped)
    return target


def caught_by(mutant: Mutant, copy: Path) -> str:
    """The first test that fails with the fault; "" where none does. Raises SystemExit where the fault does not fit."""
    path = copy / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise SystemExit(f"{mutant.file} has {text.count(mutant.before)} times: {mutant.before}")
    path.write_text(text.replace(mutant.before, mutant.after))
    files = [str(file) for name in mutant.tests.split() for file in copy.glob(f"tests/*/test_{name}.py")]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", TIER, *files]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        found = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no answer in {LIMIT_S} s"
    finally:
        path.write_text(text)
    lines = [line for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if found.returncode == 0 else (lines or ["the tests do not begin"])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="those whose file or text has this")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if asked.only in m.file + m.before]
    copies: SimpleQueue[Path] = SimpleQueue()
    missed, start_s = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.workers) as pool:
        for number in range(asked.workers):
            (Path(folder) / str(number)).mkdir()
            copies.put(copied(Path(folder) / str(number)))

        def run(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                return caught_by(mutant, copy)
            finally:
                copies.put(copy)

        for mutant, caught in zip(chosen, pool.map(run, chosen), strict=True):
            print(
                f"{'caught' if caught else 'MISSED'}  {mutant.file}: {mutant.after.strip()[:70]!r}  {caught}",
                flush=True,
            )
            missed += [mutant] * (not caught)
    took_s = time.perf_counter() - start_s
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted faults caught in {took_s:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
