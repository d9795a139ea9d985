"""Training steps of ResNet-50 and GPT-2 on gpupool and on torch's own allocator: losses, step times, peaks, the allocator's host time.

    python3 tests/torch/training.py target/release/libgpupool_capi.so [--settings TEXT] [--repeat N] [--json FILE]

Random weights from the installed torchvision and transformers, deterministic algorithms, 20 steps each. Each run is a process of its own;
those of the two allocators take turns. Exits with 1 if a loss differs in a bit, or a figure misses what is asked of it.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MODULE = os.path.join(HERE, "..", "..", "crates", "capi", "python")
STEPS = 20
MIB = 1 << 20


def resnet50():
    import torchvision

    model = torchvision.models.resnet50(weights=None).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, 224, 224, generator=generator).cuda()
    labels = torch.randint(0, 1000, (64,), generator=generator).cuda()

    def step(_):
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def gpt2(lengths, batch):
    import transformers

    config = transformers.GPT2Config(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(0, config.vocab_size, (batch, n), generator=generator).cuda() for n in lengths]

    def step(i):
        optimizer.zero_grad(set_to_none=True)
        ids = tokens[i % len(tokens)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


def varying():
    draw = random.Random(7)
    return [draw.randrange(64, 1025) for _ in range(STEPS)]


MODELS = {
    "resnet50": resnet50,
    "gpt2": lambda: gpt2([512], 8),
    "gpt2-varying": lambda: gpt2(varying(), 8),
}


def deterministic(model):
    """A fresh model under deterministic algorithms, and whether every operation of its step has one. Where one has none, it only warns;
    whether it differs shows in torch's own two runs. (Attention's backward takes another algorithm where it may warn.)"""
    for strict in (True, False):
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        torch.manual_seed(0)
        step = model()
        if not strict:
            return strict, step
        try:
            step(0)
        except RuntimeError as e:
            if "deterministic" not in str(e):
                raise
            print("  not every operation is deterministic: " + str(e).splitlines()[0][:150], flush=True)
            continue
        del step
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        return strict, model()


def work(options):
    """One process: one model on one allocator. Its figures as JSON."""
    ours = None
    if options.library:
        import gpupool_torch as ours

        ours.install(options.library, settings=options.settings, shim=options.shim or None)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    free_before = torch.cuda.mem_get_info()[0]
    strict, step = deterministic(MODELS[options.model])
    ours.reset_peak_memory_stats() if ours else torch.cuda.reset_peak_memory_stats()
    losses, times, least_free = [], [], free_before
    for i in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(i)
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        least_free = min(least_free, torch.cuda.mem_get_info()[0])
    stats = ours.memory_stats() if ours else torch.cuda.memory_stats()
    result = {
        "strict": strict,
        "losses": [x.hex() for x in losses],
        "times": times,
        "reserved_peak": stats["reserved_bytes.all.peak"],
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "device_peak": free_before - least_free,
        "driver_allocations": stats["num_device_alloc"],
        "driver_frees": stats["num_device_free"],
    }
    # Warm, without the host's waits: what a second epoch is like.
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(STEPS):
        step(i)
    torch.cuda.synchronize()
    result["second_epoch"] = time.perf_counter() - start
    stats = ours.memory_stats() if ours else torch.cuda.memory_stats()
    result["reserved_peak_second"] = stats["reserved_bytes.all.peak"]
    if options.host_time:
        result.update(host_time(options, ours, step))
    return result


def recorded_step(step, path):
    """One step's requests and frees, by torch's own record of them."""
    torch.cuda.memory._record_memory_history("all", context=None)
    step(0)
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(None)
    operations, live, requests = [], {}, 0
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = requests
            operations.append(event["size"])
            requests += 1
        elif event["action"] == "free_requested" and event["addr"] in live:
            operations.append(-1 - live.pop(event["addr"]))
    operations += [-1 - number for number in live.values()]
    with open(path, "w") as f:
        json.dump([requests, operations], f)


def host_time(options, ours, step):
    """The allocator's own time for the requests of one step, by a loop in C++."""
    if not ours:
        recorded_step(step, options.operations)
    with open(options.operations) as f:
        requests, operations = json.load(f)
    library = ctypes.CDLL(options.host_time)
    array = (ctypes.c_int64 * len(operations))(*operations)
    arguments = [array, ctypes.c_int64(len(operations)), ctypes.c_int64(requests), 30]
    library.host_time_through_torch.restype = library.host_time_of_functions.restype = ctypes.c_double
    result = {"requests": requests, "host_ns": library.host_time_through_torch(*arguments)}
    if ours:
        loaded = ours._library
        functions = [ctypes.c_void_p(ours._address(loaded, f"gpupool_torch_{name}")) for name in ("malloc", "free")]
        result["host_ns_alone"] = library.host_time_of_functions(*arguments, *functions)
    return result


def build_host_time(folder):
    from torch.utils import cpp_extension
    import torch

    result = os.path.join(folder, "libhost_time.so")
    command = ["g++", "-shared", "-fPIC", "-O2", "-std=c++17", os.path.join(HERE, "host_time.cpp"), "-o", result]
    command += [f"-I{path}" for path in cpp_extension.include_paths("cuda")]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for path in cpp_extension.library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    built = subprocess.run(command + ["-lc10_cuda", "-lc10"], capture_output=True, text=True)
    if built.returncode:
        print(f"host time is not measured: {' '.join(command)}\n{built.stderr[-2000:]}")
        return ""
    return result


def wait_and_work(options):
    """A worker: imports, which take the longest, before its turn comes."""
    global torch
    import torch
    import torchvision  # noqa: F401: takes time
    import transformers  # noqa: F401: takes time

    sys.path.insert(0, MODULE)
    if sys.stdin.readline() != "go\n":
        return 1  # Nobody waits for the result.
    print("RESULT " + json.dumps(work(options)), flush=True)


def start(options, model, library, program, operations):
    command = [sys.executable, os.path.abspath(__file__), library, "--worker", "--model", model, "--settings", options.settings]
    command += ["--host-time", program, "--operations", operations, "--shim", options.shim]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, **pipes)


def result(worker, model, name):
    said, _ = worker.communicate("go\n")
    for line in said.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
        if line.startswith("  not every"):
            print(line)
    print(f"{model} on {name} ended with {worker.returncode}:\n{said[-3000:]}", flush=True)
    return None


def compared(model, native, ours):
    """Prints a model's figures; what of them misses its mark."""
    misses = []
    times = [statistics.median(t for run in runs for t in run["times"][5:]) for runs in (native, ours)]
    epochs = [min(run["second_epoch"] for run in runs) for runs in (native, ours)]
    equal = all(run["losses"] == native[0]["losses"] for run in native + ours)
    first, last = (float.fromhex(native[0]["losses"][i]) for i in (0, -1))
    print(f"{model}: loss {first:.6f} -> {last:.6f}, {'equal bit for bit' if equal else 'DIFFERENT'} "
          f"({'every operation deterministic' if native[0]['strict'] else 'as deterministic as it can be'}) "
          f"over {STEPS} steps in {len(native)} + {len(ours)} runs")
    if not equal:
        misses.append("losses")
        for name, runs in (("torch's own", native[1:]), ("gpupool's", ours)):
            for number, run in enumerate(runs):
                pairs = [(float.fromhex(x), float.fromhex(y)) for x, y in zip(native[0]["losses"], run["losses"])]
                first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
                said = "none" if first is None else f"first at step {first}: {pairs[first][0]!r} and {pairs[first][1]!r}"
                print(f"  {name} run {number} against torch's first: differences {said}; last {pairs[-1][0]!r} and {pairs[-1][1]!r}")
    ratio = times[1] / times[0]
    print(f"  step: torch {times[0] * 1e3:.3f} ms, gpupool {times[1] * 1e3:.3f} ms, ratio {ratio:.4f}; "
          f"second epoch {epochs[0]:.4f} and {epochs[1]:.4f} s, ratio {epochs[1] / epochs[0]:.4f}")
    if ratio > 1.02:
        misses.append("step time")
    for name in ("reserved_peak", "device_peak", "allocated_peak", "reserved_peak_second"):
        theirs, mine = (max(run[name] for run in runs) for runs in (native, ours))
        print(f"  {name}: torch {theirs / MIB:.0f} MiB, gpupool {mine / MIB:.0f} MiB, ratio {mine / theirs:.4f}")
        if model == "gpt2-varying" and name in ("reserved_peak", "device_peak") and mine > 0.85 * theirs:
            misses.append(name)
    print(f"  driver allocations: torch {native[0]['driver_allocations']}, gpupool {ours[0]['driver_allocations']}")
    if "host_ns" in native[0] and "host_ns" in ours[0]:
        theirs, mine, alone = (min(run[k] for run in runs) for runs, k in ((native, "host_ns"), (ours, "host_ns"), (ours, "host_ns_alone")))
        n = native[0]["requests"]
        print(f"  allocator's host time for a step of {n} requests and frees: torch {theirs / 1e3:.1f} us ({theirs / n:.0f} ns a pair), gpupool "
              f"{mine / 1e3:.1f} us through torch ({mine / n:.0f} ns a pair, ratio {mine / theirs:.3f}), {alone / 1e3:.1f} us alone "
              f"({alone / n:.0f} ns a pair, ratio {alone / theirs:.3f})")
        # What torch keeps of a plug-in's blocks is not the allocator's time; it is printed all the same.
        if alone > 0.5 * theirs:
            misses.append("host time")
    return misses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--settings", default="")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", default="")
    parser.add_argument("--shim", default="", help="a shim that was built before")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--model", default="")
    parser.add_argument("--host-time", default="", help="what build_host_time built before")
    parser.add_argument("--operations", default="")
    options = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if options.worker:
        return wait_and_work(options)
    sys.path.insert(0, MODULE)
    import gpupool_torch

    misses, everything = {}, {}
    library = os.path.abspath(options.library)
    if not options.shim:
        options.shim = gpupool_torch.build_shim(library)
    with tempfile.TemporaryDirectory() as folder:
        program, operations = options.host_time or build_host_time(folder), os.path.join(folder, "operations.json")
        models = options.models.split(",")
        turns = [(model, name) for model in models for _ in range(options.repeat) for name in ("torch", "gpupool")]
        paths = {"torch": "", "gpupool": library}
        workers = [start(options, model, paths[name], program, operations) for model, name in turns]
        turns = list(zip(turns, workers))
        for model in models:
            runs = {"torch": [], "gpupool": []}
            for (of, name), worker in turns:
                if of == model:
                    runs[name].append(result(worker, model, name))
            everything[model] = runs
            if None in runs["torch"] + runs["gpupool"]:
                misses[model] = ["a run failed"]
                continue
            misses[model] = compared(model, runs["torch"], runs["gpupool"])
            sys.stdout.flush()
    print(f"settings {options.settings or '(default)'}; missed: { {k: v for k, v in misses.items() if v} or 'nothing'}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump(everything, f)
    return 1 if any(misses.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
