# One state of torch's allocator: python3 states.py CASE FOLDER
import json, sys, torch
case, out = sys.argv[1], sys.argv[2]
dev = torch.device("cuda", 0)
MIB = 1 << 20

def tensor(n, stream=None):
    return torch.empty(n, dtype=torch.uint8, device=dev)

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)], torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 10)).to(dev)

def train(steps=4):
    net = model()
    opt = torch.optim.AdamW(net.parameters())
    keep = []
    for step in range(steps):
        x = torch.randn(256 + 64 * step, 1024, device=dev)
        with torch.profiler.record_function(f"step {step}"):
            loss = net(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
        keep.append(loss.detach())
    return net, opt, keep

def graphs(pool=None, count=4, share=True):
    net, out_, held = model(), [], pool
    x = torch.randn(64, 1024, device=dev)
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        net(x)
    torch.cuda.current_stream().wait_stream(s)
    for n in range(count):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=held):
            y = net(x[: 16 * (n + 1)])
            z = (y * 2).sum()
        if share:
            held = g.pool()
        out_.append((g, y, z))
        g.replay()
    torch.cuda.synchronize()
    return net, x, out_

history = dict(max_entries=100000, context="all", stacks="python")
if case == "cpp_frames":
    history["stacks"] = "all"
if case == "no_frames":
    history["context"] = None
if case == "short_ring":
    history["max_entries"] = 200
if case != "no_history":
    torch.cuda.memory._record_memory_history(**history)
keep = None
if case in ("train_expandable", "train_rounded", "train_split", "no_frames", "short_ring", "no_history", "cpp_frames"):
    keep = train()
elif case == "graphs_apart":
    keep = graphs(share=False)
elif case == "graphs_expandable":
    keep = graphs()
elif case == "graphs_gone":
    net, x, made = graphs(share=False, count=3)
    kept = [made[0][1], made[2][2]]        # outputs that outlive their graphs
    del made
    keep = (net, x, kept)
elif case == "pools":
    mine = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(mine):
        a = [tensor(3 * MIB) for _ in range(6)]
    b = [tensor(700 * 1024) for _ in range(5)]
    del a[1::2]
    keep = (mine, a, b, graphs())
elif case == "streams":
    streams = [torch.cuda.Stream() for _ in range(4)]
    blocks = []
    for n, s in enumerate(streams):
        with torch.cuda.stream(s):
            blocks += [tensor((n + 1) * 5 * MIB) for _ in range(4)] + [tensor(1000 * (n + 1)) for _ in range(8)]
    del blocks[::3]
    busy, other = tensor(64 * MIB), torch.cuda.Stream()
    # Still in use on another stream while the snapshot is taken.
    with torch.cuda.stream(other):
        torch.cuda._sleep(2_000_000_000)
        busy.add_(1)
        busy.record_stream(other)
    del busy
    keep = (blocks, streams)
elif case == "fragmented_oom":
    torch.cuda.memory.set_per_process_memory_fraction(1.0 / 140)
    weights = tensor(200 * MIB)
    whole = tensor(600 * MIB)
    del whole
    held = [tensor(20 * MIB) for _ in range(30)]
    del held[::2]                          # 300 MiB are free, in pieces of 20
    try:
        tensor(300 * MIB)
        raise SystemExit("it should not have found room")
    except torch.OutOfMemoryError as error:
        open(f"{out}/{case}.message", "w").write(str(error))
    keep = (weights, held)
else:
    raise SystemExit(f"no case {case}")
stats = torch.cuda.memory_stats()
torch.cuda.memory._dump_snapshot(f"{out}/{case}.pickle")
after = torch.cuda.memory_stats()
keys = [f"{n}.all.current" for n in ("reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes", "segment", "allocation", "active", "inactive_split_bytes")]
told = {k: stats[k] for k in keys} | {"same_before_and_after": all(stats[k] == after[k] for k in keys), "torch": torch.__version__}
told |= {k: v for k, v in stats.items() if k.startswith("reserved_bytes_by_private")}
json.dump(told, open(f"{out}/{case}.stats.json", "w"))
torch.cuda.synchronize()
