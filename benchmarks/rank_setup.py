"""Measure set-up and steps of one rank of a large mesh, by the number of ranks, on torch's fake backend.

The fake backend runs one rank in one process, without the others. So the figures show what a rank computes and
allocates, not how long it waits. The batch per rank is the same on every mesh, and each mesh is measured in a fresh
process. The column "torch" is the time of `init_device_mesh` with the same mesh.

"Neighbours" is the number of ranks with which a rank exchanges messages when ranks compare a call: the sum of
(size - 1) over the rounds of `HostGroup`. In a ring over all N ranks, each message takes N - 1 hops.

    python benchmarks/rank_setup.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

MESHES = ["dp1,tp8", "dp8,tp8", "dp64,tp8", "dp512,tp8", "dp2048,tp8"]
PIPELINES = ["dp2,pp2,tp2", "dp4,pp4,tp4", "dp16,pp4,tp8", "dp128,pp4,tp8", "dp512,pp4,tp8"]
ROWS_PER_RANK = 8
ROW = "{:16} {:>6} {:>8} {:>9} {:>13} {:>8} {:>9} {:>11}  {}"

RANK = """
import json, resource, statistics, sys, time, torch, autopart
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from autopart.ir.mesh import Mesh
torch.set_num_threads(1)
mesh = Mesh.parse(sys.argv[1])
torch.distributed.init_process_group("fake", rank=mesh.num_ranks - 1, world_size=mesh.num_ranks, store=FakeStore())
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(16)))
x = torch.zeros(int(sys.argv[2]) * mesh.size("dp"), 64)
start_s = time.process_time()
init_device_mesh("cpu", tuple(mesh.sizes.values()), mesh_dim_names=tuple(mesh.sizes))
torch_s = time.process_time() - start_s
start_s = time.process_time()
pm = autopart.parallelize(model, str(mesh), example_args=(x,))
setup_s = time.process_time() - start_s
optimizer, steps_s = torch.optim.SGD(pm.parameters(), lr=0.0), []
for _ in range(8):
    start_s = time.process_time()
    pm.step(x, loss_fn=torch.nn.functional.mse_loss, target=x)
    optimizer.step()
    steps_s.append(time.process_time() - start_s)
sizes = [group.size() for group in pm._process.host_group.groups]
print(json.dumps({
    "mesh": str(mesh), "ranks": mesh.num_ranks, "torch_s": torch_s, "setup_s": setup_s, "first_step_s": steps_s[0],
    "step_s": statistics.median(steps_s[1:]), "rounds": sizes, "neighbours": sum(size - 1 for size in sizes),
    "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def measured(mesh: str) -> dict:
    ran = subprocess.run(
        [sys.executable, "-c", RANK, mesh, str(ROWS_PER_RANK)], capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small meshes")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    meshes = [MESHES[1], PIPELINES[0]] if arguments.quick else MESHES + PIPELINES
    titles = "mesh", "ranks", "torch s", "set-up s", "first step s", "step ms", "peak MiB", "neighbours", "rounds"
    print(ROW.format(*titles))
    rows = []
    for mesh in meshes:
        row = measured(mesh)
        rows.append(row)
        times = (f"{row[name]:.2f}" for name in ("torch_s", "setup_s", "first_step_s"))
        step_ms, peak = f"{1e3 * row['step_s']:.1f}", f"{row['peak_MiB']:.0f}"
        rounds = " x ".join(map(str, row["rounds"]))
        print(ROW.format(mesh, row["ranks"], *times, step_ms, peak, row["neighbours"], rounds), flush=True)
    if arguments.json:
        print(json.dumps({"benchmark": "rank_setup", "rows": rows}))


if __name__ == "__main__":
    main()
