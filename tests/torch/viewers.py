# Our inspect beside torch's counters, torch's own viewer functions on torch's file and on ours.
import concurrent.futures, json, os, pathlib, pickle, subprocess, sys, inspect as insp, io, contextlib
from torch.cuda import _memory_viz as viz
gpupool, folder, repo = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
wrong = 0
def say(ok, text):
    global wrong
    wrong += not ok
    print(("ok    " if ok else "WRONG ") + text, flush=True)
def run(*args):
    try:
        return subprocess.run([gpupool, *map(str, args)], capture_output=True, text=True, timeout=15)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(args, 1, "", "took more than 15 s")
def text_of(f, *args):
    extra = {"format_flamegraph": lambda lines: lines} if "format_flamegraph" in insp.signature(f).parameters else {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = f(*args, **extra)
    return out.getvalue() + (result if isinstance(result, str) else repr(result))
waiting, pool = [], concurrent.futures.ThreadPoolExecutor(15)
def one_command(path, name, command):
    more = ["-o", f"{folder}/{name}.{command}.html"] if command.endswith("plot") else []
    done = subprocess.run([sys.executable, "-m", "torch.cuda._memory_viz", command, str(path), *more], capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    return done.returncode == 0, f"{name}: _memory_viz.py {command}" + ("" if done.returncode == 0 else "\n" + done.stderr[-600:])
def viewers(path, name):
    for command in ("trace", "trace_plot", "segment_plot"):
        waiting.append(pool.submit(one_command, path, name, command))
theirs = sorted(folder.glob("*.pickle")) + sorted((repo / "crates/snapshot/data").glob("*.pickle"))
ours_folder = folder / "ours"; ours_folder.mkdir(exist_ok=True)
recorded = json.load(open(repo / "crates/snapshot/data/stats.json"))
for path in theirs:
    name = path.stem
    stats_file = folder / f"{name}.stats.json"
    done = run("inspect", path, "--json")
    if done.returncode:
        say(False, f"{name}: inspect: {done.stderr[-400:]}"); continue
    total = json.loads(done.stdout)["summary"]["total"]
    got = {"reserved_bytes": total["reserved"], "allocated_bytes": total["live"], "active_bytes": total["live"] + total["pending"], "requested_bytes": total["requested"], "allocation": total["live_blocks"]}
    if stats_file.exists():
        stats = json.load(open(stats_file))
        if not stats["same_before_and_after"]:
            print(f"note  {name}: torch's counters moved while it was dumped")
        for key, value in got.items():
            want = stats[f"{key}.all.current"]
            say(value == want, f"{name}: {key} {value} torch {want}")
        if "expandable" not in name:
            say(total["segments"] == stats["segment.all.current"], f"{name}: segments {total['segments']} torch {stats['segment.all.current']}")
        by_pool = {f"reserved_bytes_by_private_pools.{p['pool'][0]}_{p['pool'][1]}.all.current": p["reserved"] for p in json.loads(done.stdout)["summary"]["by_pool"] if p["pool"] != [0, 0]}
        for key in [k for k in stats if k.startswith("reserved_bytes_by_private") and k.endswith(".all.current")]:
            say(by_pool.get(key, 0) == stats[key], f"{name}: {key} {by_pool.get(key, 0)} torch {stats[key]}")
    elif name in recorded:
        for key in ("reserved_bytes", "allocated_bytes", "active_bytes"):
            say(got[key] == recorded[name][key], f"{name}: {key} {got[key]} torch {recorded[name][key]}")
    ours = ours_folder / f"ours-{name}.pickle"
    done = run("inspect", path, "--snapshot", ours)
    if done.returncode:
        say(False, f"{name}: inspect --snapshot: {done.stderr[-400:]}"); continue
    a, b = pickle.load(open(path, "rb")), pickle.load(open(ours, "rb"))
    for f in ("segments", "memory", "segsum", "trace"):
        f = getattr(viz, f)
        x, y = text_of(f, a), text_of(f, b)
        say(x == y, f"{name}: {f.__name__} gives the same text, {len(x)} characters" + ("" if x == y else "\n   first difference at %d:\n   %r\n   %r" % next((i, x[max(0, i - 60):i + 60], y[max(0, i - 60):i + 60]) for i in range(max(len(x), len(y))) if x[i:i+1] != y[i:i+1])))
    viewers(ours, f"ours-{name}")
    done = run("inspect", path, "--html", folder / "page.html")
    say(done.returncode == 0, f"{name}: page")
pairs = [p for p in theirs if "train" in p.stem][:2]
if len(pairs) == 2:
    a, b = (pickle.load(open(p, "rb"))["segments"] for p in pairs)
    c, d = (pickle.load(open(ours_folder / f"ours-{p.stem}.pickle", "rb"))["segments"] for p in pairs)
    say(text_of(viz.compare, a, b) == text_of(viz.compare, c, d), "compare gives the same text")
gpu = subprocess.run([sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]).returncode == 0
if not gpu:
    print("skipped: our own states on a GPU: there is none")
for device, name in (("sim", "own-sim"), ("cuda", "own-gpu"))[: 2 if gpu else 1]:
    for trace in ("gpt2_train", "graph_serving"):
        path = ours_folder / f"{name}-{trace}.pickle"
        done = run("replay", repo / f"crates/replay/data/traces/{trace}.trace.gz", "--device", device, "--snapshot", path)
        if done.returncode:
            say(False, f"{name}-{trace}: replay: {done.stderr[-300:]}"); continue
        data = pickle.load(open(path, "rb"))
        for f in (viz.segments, viz.memory, viz.segsum):
            try:
                say(len(text_of(f, data)) > 0, f"{name}-{trace}: {f.__name__} runs")
            except Exception as error:
                say(False, f"{name}-{trace}: {f.__name__}: {error!r}")
        if device == "cuda" or trace == "graph_serving":
            viewers(path, path.stem)
for one in waiting:
    say(*one.result())
print(f"{wrong} wrong")
sys.exit(wrong > 0)
