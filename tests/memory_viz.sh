#!/usr/bin/env bash
# PyTorch's own _memory_viz.py on our snapshots, and beside torch's of the same state. Needs torch; where there is a GPU, states of torch's
# allocator are made there first, and `inspect` is compared with its counters.
#   tests/memory_viz.sh [path to gpupool]
set -euo pipefail
cd "$(dirname "$0")/.."
gpupool=$(realpath "${1:-target/release/gpupool}"); repo=$PWD
python3 -c 'import torch' 2>/dev/null || { echo "skipped: no torch"; exit 0; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir "$work/states"; cp tests/torch/states.py "$work/train.py"; cd "$work"
make() { PYTORCH_CUDA_ALLOC_CONF=$2 timeout 120 python3 train.py "$1" states || echo "not made: $1"; }
if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    make train_expandable expandable_segments:True
    make graphs_expandable expandable_segments:True
    make train_rounded roundup_power2_divisions:4
    make train_split max_split_size_mb:64,garbage_collection_threshold:0.6
    for case in graphs_apart graphs_gone pools streams fragmented_oom cpp_frames no_frames short_ring no_history; do make $case ""; done
fi
python3 "$repo/tests/torch/viewers.py" "$gpupool" "$work/states" "$repo"
