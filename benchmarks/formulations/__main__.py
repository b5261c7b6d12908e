import sys
import torch
from benchmarks.formulations import harness
from benchmarks.formulations.harness import measure, row
torch.set_num_threads(2)
import importlib
mod, batch = sys.argv[1], int(sys.argv[2])
pattern = sys.argv[3] if len(sys.argv) > 3 else ""
if len(sys.argv) > 4: harness.ROUNDS = int(sys.argv[4])
for case in importlib.import_module("benchmarks.formulations." + mod).cases(batch):
    if pattern not in case.name: continue
    r = measure(case)
    print(row(r), flush=True)
    for k, v in r.refused.items(): print("   ", k, v)
