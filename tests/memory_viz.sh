#!/usr/bin/env bash
# Runs PyTorch's own _memory_viz.py on our snapshots and compares with torch's of the same state. Needs torch; no GPU.
#   tests/memory_viz.sh [path to gpupool]
set -euo pipefail
cd "$(dirname "$0")/.."
gpupool=${1:-target/release/gpupool}
python3 -c 'import torch' 2>/dev/null || { echo "skipped: no torch"; exit 0; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
# Ours of the same state: torch's, read and written again; and one of our own allocator.
cargo test -q -p gpupool-snapshot --test pickles -- --ignored write_ours_again >/dev/null
"$gpupool" replay --snapshot "$work/own.pickle" --json >/dev/null
python3 - "$work" <<'PY'
import pickle, subprocess, sys, pathlib
from torch.cuda import _memory_viz as viz
work = pathlib.Path(sys.argv[1])
for name in ("train", "graphs_shared", "oom"):
    theirs = pathlib.Path(f"crates/snapshot/data/{name}.pickle")
    ours = pathlib.Path(f"target/ours-{name}.pickle")
    a, b = pickle.load(open(theirs, "rb")), pickle.load(open(ours, "rb"))
    for f in (viz.segments, viz.memory, viz.segsum):
        assert f(a) == f(b), f"{name}: {f.__name__} differs"
    print(f"{name}: segments, memory and segsum give the same text")
for path in [*pathlib.Path("target").glob("ours-*.pickle"), work / "own.pickle"]:
    for command in ("trace", "trace_plot", "segment_plot"):
        out = [] if command == "trace" else ["-o", str(work / "out.html")]
        subprocess.run([sys.executable, "-m", "torch.cuda._memory_viz", command, str(path), *out], check=True, stdout=subprocess.DEVNULL)
    print(f"{path.name}: trace, trace_plot and segment_plot run")
PY
