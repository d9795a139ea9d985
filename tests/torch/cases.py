"""What PyTorch's users do with its allocator and its graphs, case by case, on gpupool and on torch's own allocator.

    python3 tests/torch/cases.py target/release/libgpupool_capi.so [--settings TEXT] [--only WORD] [--json FILE]

Runs every case twice in the same run, in a process each for gpupool (as the current allocator) and for torch's own, and prints one table.
Needs a GPU, torch 2.11 and g++. Exits with 1 if a case fails on gpupool. A process that a case kills, or whose GPU context a case
spoils, is started again with the case after it.
"""

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MODULE = os.path.join(HERE, "..", "..", "crates", "capi", "python")
MIB = 1 << 20
CASES = []


def case(function):
    CASES.append(function)
    return function


class Allocator:
    """Figures of whichever allocator is current, under torch's names."""

    def __init__(self, library, settings, shim):
        self.ours = bool(library)
        if self.ours:
            sys.path.insert(0, MODULE)
            import gpupool_torch

            gpupool_torch.install(library, settings=settings, shim=shim or None)
            self.module = gpupool_torch

    def stats(self):
        return self.module.memory_stats() if self.ours else torch.cuda.memory_stats()

    def __call__(self, name):
        return self.stats()[name]

    def reset_peaks(self):
        return self.module.reset_peak_memory_stats() if self.ours else torch.cuda.reset_peak_memory_stats()

    def pool_bytes(self, graph):
        """Bytes that a graph's pool has reserved."""
        if self.ours:
            return self.module.pool_bytes(graph.pool())[0]
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(graph.pool()))

    def snapshot(self, path):
        if self.ours:
            return self.module.snapshot(path)
        torch.cuda.memory._dump_snapshot(path)


def raises(kind, function, *words):
    try:
        function()
    except kind as e:
        text = str(e)
        missing = [w for w in words if w.lower() not in text.lower()]
        assert not missing, f"{type(e).__name__} does not speak of {missing}: {text}"
        return text
    raise AssertionError(f"no {kind.__name__}")


def equal(tensor, value):
    assert (tensor == value).all().item(), f"{tensor.flatten()[:4].tolist()} is not {value}"


def busy(milliseconds=20):
    """Keeps the current stream busy for about so long."""
    torch.cuda._sleep(int(milliseconds * 1_500_000))


def churn(times=20, stream=None):
    """Other work that takes and writes memory of many sizes: whatever is free by mistake is overwritten."""
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        for i in range(times):
            torch.full((1 << (8 + i % 14),), -7.0, device="cuda").add_(1)


def captured(function, pool=None, **options):
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, **options):
            out = function()
    except BaseException:
        # torch 2.11 leaves the capture's stream current when the end of the capture fails.
        torch.cuda.set_stream(stream)
        raise
    return graph, out


# ---- graphs in succession ---------------------------------------------------------------------------------------------------------


@case
def one_graph_replays_with_new_inputs(a):
    x = torch.zeros(1000, device="cuda")

    def step():
        y = x
        for _ in range(8):
            y = (y + 1) * 2
        return y

    g, y = captured(step)
    for value in (0.0, 3.0, -5.0):
        x.fill_(value)
        g.replay()
        churn()
        want = value
        for _ in range(8):
            want = (want + 1) * 2
        equal(y, want)


def in_succession(a, pools, count):
    """Each graph works on what the one before made."""
    size = 1000
    x = torch.ones(size, device="cuda")
    graphs, value, results = [], x, []
    handle = torch.cuda.graph_pool_handle() if pools == "handle" else None
    for i in range(count):
        pool = {"separate": None, "handle": handle, "first": graphs[0].pool() if graphs else None}[pools]

        def step(value=value):
            out = value.clone()
            for _ in range(5):
                out = out + torch.ones(size, device="cuda")
            return out

        g, value = captured(step, pool)
        graphs.append(g)
        results.append(value)
    for start in (1.0, 10.0):
        x.fill_(start)
        for g in graphs:
            g.replay()
        churn()
        for i, result in enumerate(results):
            equal(result, start + 5 * (i + 1))
    ids = {tuple(g.pool()) for g in graphs}
    assert len(ids) == (count if pools == "separate" else 1), ids


@case
def two_graphs_in_succession_with_a_pool_each(a):
    in_succession(a, "separate", 2)


@case
def two_graphs_in_succession_share_the_first_ones_pool(a):
    in_succession(a, "first", 2)


@case
def two_graphs_in_succession_share_a_handle(a):
    in_succession(a, "handle", 2)


@case
def three_graphs_in_succession_with_a_pool_each(a):
    in_succession(a, "separate", 3)


@case
def three_graphs_in_succession_share_a_pool(a):
    in_succession(a, "first", 3)


@case
def graphs_that_share_a_pool_take_the_memory_of_the_largest(a):
    x, handle, graphs = torch.ones(8 * MIB, device="cuda"), torch.cuda.graph_pool_handle(), {}
    out = torch.empty((), device="cuda")

    def step(n):
        y = x[: n * MIB] + 1
        out.copy_((y * 2).sum())

    for n in range(8, 0, -1):
        graphs[n] = captured(lambda: step(n), handle)[0]
    for n in (8, 1, 5):
        graphs[n].replay()
        assert out.item() == 4.0 * n * MIB, out.item()
    largest = captured(lambda: step(8))[0]
    shared, alone = a.pool_bytes(graphs[8]), a.pool_bytes(largest)
    assert shared <= alone, (shared, alone)
    return f"{shared >> 20} MiB for eight, {alone >> 20} for the largest alone"


@case
def a_block_freed_in_one_capture_serves_the_next_into_the_pool(a):
    handle, x = torch.cuda.graph_pool_handle(), torch.ones(4 * MIB, device="cuda")
    places, out = [], torch.empty((), device="cuda")

    def step():
        y = x + 1
        places.append(y.data_ptr())
        out.copy_(y.sum())

    first, _ = captured(step, handle)
    second, _ = captured(step, handle)
    assert places[0] == places[1]
    for g in (first, second, first):
        out.zero_()
        g.replay()
        assert out.item() == 8.0 * MIB


# ---- replays at once, orders, lifetimes -------------------------------------------------------------------------------------------


@case
def graphs_with_a_pool_each_replay_at_once(a):
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = [torch.full((MIB,), float(i + 1), device="cuda") for i in range(2)]

    def step(i):
        y = x[i]
        for _ in range(20):
            y = y + x[i]
        return y

    graphs = [captured(lambda i=i: step(i)) for i in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (g, _) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                busy(1)
                g.replay()
    torch.cuda.synchronize()
    for i, (_, y) in enumerate(graphs):
        equal(y, 21.0 * (i + 1))


@case
def a_result_is_used_after_its_graph_is_gone(a):
    x = torch.ones(MIB, device="cuda")
    g, y = captured(lambda: (x + 1) * 2)
    g.replay()
    del g
    gc.collect()
    churn(60)
    torch.cuda.empty_cache()
    churn(60)
    equal(y, 4.0)
    place = y.data_ptr()
    del y
    torch.cuda.synchronize()
    churn(60)
    return f"at {place:#x}"


@case
def memory_comes_back_when_graph_and_results_are_gone(a):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = a("reserved_bytes.all.current")
    x = torch.ones(16 * MIB, device="cuda")
    g, y = captured(lambda: (x + 1) * 2)
    g.replay()
    torch.cuda.synchronize()
    during = a("reserved_bytes.all.current")
    assert during >= before + 2 * 64 * MIB, (before, during)
    del g, y, x
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after = a("reserved_bytes.all.current")
    assert after <= before + 4 * MIB, (before, during, after)


@case
def a_graph_is_dropped_while_its_replay_runs(a):
    x = torch.ones(MIB, device="cuda")
    out = torch.zeros(MIB, device="cuda")
    for turn in range(20):

        def step():
            y = x + turn
            for _ in range(10):
                y = y + 1
            out.copy_(y)

        g, _ = captured(step)
        busy(3)
        g.replay()
        del g
        torch.cuda.empty_cache() if turn % 2 else None
        side = torch.cuda.Stream()
        churn(30, side)
        torch.cuda.synchronize()
        equal(out, 11.0 + turn)


@case
def graphs_of_one_pool_die_in_any_order(a):
    x, handle = torch.ones(MIB, device="cuda"), torch.cuda.graph_pool_handle()
    graphs = [captured(lambda i=i: x + i, handle) for i in range(10)]
    for i in (3, 0, 9, 5):
        graphs[i] = None
    gc.collect()
    torch.cuda.empty_cache()
    churn(40)
    for i, pair in enumerate(graphs):
        if pair:
            pair[0].replay()
            equal(pair[1], 1.0 + i)


@case
def a_graph_is_reset_and_captured_again(a):
    x = torch.ones(MIB, device="cuda")
    g = torch.cuda.CUDAGraph()
    for turn in range(3):
        with torch.cuda.graph(g):
            y = x * (turn + 2)
        g.replay()
        equal(y, turn + 2.0)
        g.reset()
        del y


# ---- streams ----------------------------------------------------------------------------------------------------------------------


@case
def record_stream_keeps_a_block_from_early_reuse(a):
    side = torch.cuda.Stream()
    out = torch.zeros(MIB, device="cuda")
    for turn in range(10):
        x = torch.full((MIB,), float(turn), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            busy(5)
            out.copy_(x)
        x.record_stream(side)
        del x
        taken = [torch.full((MIB,), -1.0, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        equal(out, float(turn))
        del taken


@case
def a_block_of_a_side_stream_is_used_on_the_main_one(a):
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for turn in range(10):
        with torch.cuda.stream(side):
            x = torch.full((MIB,), float(turn), device="cuda")
        main.wait_stream(side)
        busy(3)
        y = x + 1
        x.record_stream(main)
        del x
        with torch.cuda.stream(side):
            z = torch.full((MIB,), -1.0, device="cuda")
        torch.cuda.synchronize()
        equal(y, turn + 1.0)
        del z


@case
def a_capture_forks_and_joins_side_streams(a):
    x, side, third = torch.ones(MIB, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()

    def step():
        main = torch.cuda.current_stream()
        y = x + 1
        side.wait_stream(main)
        third.wait_stream(main)
        with torch.cuda.stream(side):
            p = (y * 2) + torch.ones(MIB, device="cuda")
        with torch.cuda.stream(third):
            q = (y * 3) + torch.ones(MIB, device="cuda")
        main.wait_stream(side)
        main.wait_stream(third)
        return p + q

    g, out = captured(step)
    for value in (1.0, 4.0):
        x.fill_(value)
        g.replay()
        churn()
        equal(out, 5 * (value + 1) + 2)


@case
def record_stream_inside_a_capture(a):
    x, side = torch.ones(MIB, device="cuda"), torch.cuda.Stream()

    def step():
        main = torch.cuda.current_stream()
        outs = []
        for i in range(5):
            y = x + i
            side.wait_stream(main)
            with torch.cuda.stream(side):
                z = y * 2
            y.record_stream(side)
            del y
            z.record_stream(main)
            outs.append(z)
        main.wait_stream(side)
        return torch.stack(outs).sum(0)

    g, out = captured(step)
    for value in (1.0, 2.0):
        x.fill_(value)
        g.replay()
        equal(out, 2 * (5 * value + 10))


@case
def what_was_allocated_before_a_capture_is_freed_inside_it(a):
    side = torch.cuda.Stream()
    x = torch.ones(MIB, device="cuda")
    loose = [torch.full((MIB,), 3.0, device="cuda") for _ in range(4)]
    for block in loose:
        block.record_stream(side)
    torch.cuda.synchronize()
    keep = []

    def step():
        loose.clear()
        y = x + 1
        keep.append(torch.zeros(MIB, device="cuda"))
        return y

    g, y = captured(step)
    for _ in range(3):
        g.replay()
        churn()
        equal(y, 2.0)


@case
def an_external_stream(a):
    stream = torch.cuda.Stream()
    outside = torch.cuda.ExternalStream(stream.cuda_stream)
    with torch.cuda.stream(outside):
        x = torch.ones(MIB, device="cuda")
        y = x + 1
    outside.synchronize()
    equal(y, 2.0)


# ---- errors -----------------------------------------------------------------------------------------------------------------------


def still_works(a):
    x = torch.ones(MIB, device="cuda")
    equal(x + 1, 2.0)
    g, y = captured(lambda: x + 2)
    g.replay()
    equal(y, 3.0)


@case
def a_capture_that_synchronises_fails_and_nothing_else_does(a):
    x = torch.ones(MIB, device="cuda")

    def step():
        y = x + 1
        return y.sum().item()

    raises(RuntimeError, lambda: captured(step))
    torch.cuda.synchronize()
    gc.collect()
    still_works(a)


@case
def an_exception_in_the_captured_code_leaves_everything_usable(a):
    x = torch.ones(MIB, device="cuda")

    def step():
        y = x + 1
        z = y * 2
        raise KeyError("mine")

    raises(KeyError, lambda: captured(step), "mine")
    gc.collect()
    torch.cuda.empty_cache()
    still_works(a)


@case
def a_capture_on_the_default_stream_is_refused(a):
    g = torch.cuda.CUDAGraph()
    raises(RuntimeError, g.capture_begin, "stream")
    del g
    still_works(a)


@case
def an_unjoined_side_stream_fails_the_capture(a):
    x, side = torch.ones(MIB, device="cuda"), torch.cuda.Stream()

    def step():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x + 1

    raises(RuntimeError, lambda: captured(step))
    torch.cuda.synchronize()
    gc.collect()
    still_works(a)


@case
def an_empty_graph(a):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        g, _ = captured(lambda: None)
        g.replay()
    still_works(a)


@case
def out_of_memory_is_torchs_own_exception(a):
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    text = raises(torch.OutOfMemoryError, lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"), "memory")
    assert a("num_ooms") >= 1
    keep = torch.ones(MIB, device="cuda")
    for _ in range(3):
        raises(torch.OutOfMemoryError, lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"), "memory")
    equal(keep, 1.0)
    still_works(a)
    return text.splitlines()[0][:100]


@case
def out_of_memory_under_a_fraction_and_what_was_held_can_be_freed(a):
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        held, piece = [], total // 400

        def fill():
            while True:
                held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))

        raises(torch.OutOfMemoryError, fill, "memory")
        taken = len(held)
        assert 1 <= taken <= 8, taken
        held.pop()
        torch.ones(piece, dtype=torch.uint8, device="cuda")
        held.clear()
        torch.empty(piece * (taken - 1), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    still_works(a)
    return f"{taken} pieces of 1/400"


@case
def out_of_memory_inside_a_capture(a):
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    x = torch.ones(MIB, device="cuda")

    def step():
        y = x + 1
        return y, torch.empty(2 * total, dtype=torch.uint8, device="cuda")

    raises(torch.OutOfMemoryError, lambda: captured(step), "memory")
    torch.cuda.synchronize()
    gc.collect()
    still_works(a)


# ---- training ---------------------------------------------------------------------------------------------------------------------


def network():
    torch.manual_seed(5)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)]
    return torch.nn.Sequential(*layers).cuda()


def batches(count):
    generator = torch.Generator().manual_seed(9)
    make = lambda *shape: torch.randn(*shape, generator=generator).cuda()
    return [(make(32, 64), make(32, 8)) for _ in range(count)]


def train(steps, capture):
    model, data = network(), batches(steps)
    loss_of, optimizer = torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05)
    x, t = data[0][0].clone(), data[0][1].clone()
    losses, graph = [], None

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(x), t)
        loss.backward()
        optimizer.step()
        return loss

    if capture:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(3):
                x.copy_(data[i][0])
                t.copy_(data[i][1])
                losses.append(step().item())
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad(set_to_none=True)
        graph, loss = captured(step)
        for i in range(3, steps):
            x.copy_(data[i][0])
            t.copy_(data[i][1])
            graph.replay()
            losses.append(loss.item())
    else:
        for i in range(steps):
            x.copy_(data[i][0])
            t.copy_(data[i][1])
            losses.append(step().item())
    return losses, [p.detach().clone() for p in model.parameters()]


@case
def a_captured_training_step_learns_what_the_eager_one_does(a):
    (eager, p), (graphed, q) = train(20, False), train(20, True)
    assert eager == graphed, [(i, x, y) for i, (x, y) in enumerate(zip(eager, graphed)) if x != y][:3]
    assert all(torch.equal(x, y) for x, y in zip(p, q))
    return f"loss {eager[0]:.6f} -> {eager[-1]:.6f}"


@case
def gradients_are_captured(a):
    model, (x, t) = network(), batches(1)[0]
    loss_of = torch.nn.MSELoss()
    loss_of(model(x), t).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss_of(model(x), t).backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)

    def step():
        loss = loss_of(model(x), t)
        loss.backward()
        return loss

    g, _ = captured(step)
    grads = [p.grad for p in model.parameters()]
    for _ in range(3):
        for grad in grads:
            grad.zero_()
        g.replay()
        churn()
        assert all(torch.equal(x, y) for x, y in zip(want, grads))


def callables(a, pair):
    (x, t), steps = batches(1)[0], 10
    runs = []
    for graphed in (False, True):
        model = network()
        parts = [model[:3], model[3:]]
        if graphed:
            sample = torch.randn(32, 64, device="cuda")
            second = torch.randn(32, 64, device="cuda", requires_grad=True)
            if pair:
                parts = torch.cuda.make_graphed_callables(tuple(parts), ((sample,), (second,)))
            else:
                parts = [torch.cuda.make_graphed_callables(model, (sample,)), torch.nn.Identity()]
        elif not pair:
            parts = [model, torch.nn.Identity()]
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.mse_loss(parts[1](parts[0](x)), t)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs.append((losses, [p.detach().clone() for p in model.parameters()]))
    (eager, p), (graphed, q) = runs
    assert eager == graphed, (eager, graphed)
    assert all(torch.equal(x, y) for x, y in zip(p, q))


@case
def make_graphed_callables_of_one_module(a):
    callables(a, False)


@case
def make_graphed_callables_of_two_modules_in_a_row(a):
    callables(a, True)


@case
def mixed_precision_with_a_scaler_is_captured(a):
    model, data = network(), batches(6)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cuda", init_scale=1024.0)
    x, t = data[0][0].clone(), data[0][1].clone()

    def forward_backward():
        with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
            loss = torch.nn.functional.mse_loss(model(x), t)
        scaler.scale(loss).backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    g, loss = captured(forward_backward)
    values = []
    for xs, ts in data:
        for p in model.parameters():
            p.grad.zero_()
        x.copy_(xs)
        t.copy_(ts)
        g.replay()
        scaler.step(optimizer)
        scaler.update()
        values.append(loss.item())
    assert all(v == v and v < 10 for v in values), values


@case
def dropout_draws_new_numbers_in_each_replay(a):
    x = torch.ones(100_000, device="cuda")
    torch.manual_seed(3)
    eager = [torch.nn.functional.dropout(x, 0.5) for _ in range(4)]
    g, y = captured(lambda: torch.nn.functional.dropout(x, 0.5))
    torch.manual_seed(3)
    for want in eager:
        g.replay()
        assert torch.equal(y, want)
    assert not torch.equal(eager[0], eager[1])


@case
def convolutions_and_their_workspaces_are_captured(a):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3)).cuda()
    x = torch.randn(8, 3, 64, 64, device="cuda")
    with torch.no_grad():
        model.eval()
        want = model(x)
        g, y = captured(lambda: model(x))
        for _ in range(3):
            g.replay()
            churn()
            assert torch.equal(y, want)


# ---- eager work beside graphs, threads --------------------------------------------------------------------------------------------


@case
def eager_work_and_replays_take_turns(a):
    x = torch.ones(MIB, device="cuda")

    def step():
        y = x
        for i in range(12):
            y = y + torch.full((MIB,), float(i), device="cuda")
        return y

    g, y = captured(step)
    kept = []
    for turn in range(200):
        x.fill_(float(turn))
        g.replay()
        kept.append(torch.full((MIB // 4 + 1000 * turn,), -3.0, device="cuda"))
        if len(kept) > 5:
            kept.pop(0)
        if turn % 50 == 0:
            torch.cuda.empty_cache()
        equal(y, turn + 66.0)


@case
def other_threads_allocate_while_one_captures(a):
    x, stop, errors = torch.ones(MIB, device="cuda"), threading.Event(), []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                turn = 0
                while not stop.is_set():
                    turn += 1
                    y = torch.full((MIB // 2 + 512 * (turn % 50),), float(turn), device="cuda")
                    y.add_(1)
                    del y
        except BaseException as e:  # noqa: BLE001: reported below
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    try:
        for mode in ("thread_local", "relaxed", "thread_local"):
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode=mode)
                y = x
                for _ in range(50):
                    y = y + 1
                    time.sleep(0.0005)
                graph.capture_end()
            for _ in range(5):
                graph.replay()
            torch.cuda.current_stream().synchronize()
            equal(y, 51.0)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not errors, errors
    torch.cuda.synchronize()


@case
def threads_allocate_and_free_each_others_tensors(a):
    import queue

    q, errors = queue.Queue(8), []

    def consume():
        try:
            while (item := q.get()) is not None:
                value, x = item
                torch.cuda.current_stream().synchronize()
                equal(x, float(value))
                del x, item
        except BaseException as e:  # noqa: BLE001: reported below
            errors.append(e)

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for t in threads:
        t.start()
    for i in range(300):
        q.put((i, torch.full((1000 + 999 * (i % 40),), float(i), device="cuda")))
    for _ in threads:
        q.put(None)
    for t in threads:
        t.join()
    assert not errors, errors


@case
def every_capture_error_mode(a):
    x = torch.ones(MIB, device="cuda")
    for mode in ("global", "thread_local", "relaxed"):
        g, y = captured(lambda: x * 3, capture_error_mode=mode)
        g.replay()
        equal(y, 3.0)


@case
def copies_from_pinned_memory_are_captured(a):
    host = torch.empty(MIB, pin_memory=True)
    out = torch.empty(MIB, pin_memory=True)

    def step():
        x = host.to("cuda", non_blocking=True)
        y = x * 2
        out.copy_(y, non_blocking=True)

    g, _ = captured(step)
    for value in (1.0, 6.0):
        host.fill_(value)
        g.replay()
        torch.cuda.synchronize()
        equal(out, 2 * value)


# ---- figures ----------------------------------------------------------------------------------------------------------------------


@case
def tensors_of_no_bytes(a):
    before = a("allocated_bytes.all.current")
    many = [torch.empty(0, device="cuda"), torch.empty(3, 0, 5, device="cuda"), torch.zeros(0, 7, device="cuda")]
    assert [t.sum().item() for t in many] == [0, 0, 0]
    side = torch.cuda.Stream()
    many[0].record_stream(side)
    assert torch.cat(many[:1] + [torch.ones(2, device="cuda")]).tolist() == [1, 1]
    del many
    assert a("allocated_bytes.all.current") == before


@case
def figures_have_torchs_names_and_say_what_happened(a):
    stats = a.stats()
    for kind in ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"):
        for pool in ("all", "small_pool", "large_pool"):
            for what in ("current", "peak", "allocated", "freed"):
                assert isinstance(stats[f"{kind}.{pool}.{what}"], int), (kind, pool, what)
    for name in ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams"):
        assert name in stats, name
    before = stats["allocated_bytes.all.current"]
    x = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    assert a("allocated_bytes.all.current") == before + 4 * MIB
    assert a("reserved_bytes.all.current") >= a("allocated_bytes.all.current")
    y = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    del y
    a.reset_peaks()
    peak = a("allocated_bytes.all.peak")
    assert peak == before + 4 * MIB, (before, peak)
    del x
    assert a("allocated_bytes.all.current") == before


@case
def emptying_the_cache_gives_memory_back_to_the_device(a):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    x = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    held = torch.cuda.mem_get_info()[0]
    assert before - held >= 256 * MIB, (before, held)
    del x
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after = torch.cuda.mem_get_info()[0]
    assert after >= before - 4 * MIB, (before, held, after)


@case
def a_snapshot_opens_in_torchs_memory_viewer(a):
    import pickle

    from torch.cuda import _memory_viz

    x = torch.ones(3 * MIB, device="cuda")
    g, y = captured(lambda: x + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state.pickle")
        a.snapshot(path)
        with open(path, "rb") as f:
            state = pickle.load(f)
    blocks = [b for s in state["segments"] for b in s["blocks"]]
    assert any(b["state"] == "active_allocated" and b.get("address", 0) == x.data_ptr() for b in blocks), "x is not in it"
    pools = {tuple(s["segment_pool_id"]) for s in state["segments"]}
    assert tuple(g.pool()) in pools, (g.pool(), pools)
    text = _memory_viz.segsum(state)
    page = _memory_viz.segment_plot(state)
    lines = _memory_viz.memory(state, format_flamegraph=lambda lines, **_: lines)
    assert "<html" in page.lower() or "<!doctype" in page.lower() or "<script" in page.lower()
    assert len(text) > 50 and len(lines) > 50
    return f"{len(state['segments'])} segments, {len(blocks)} blocks"


# ---- the program ------------------------------------------------------------------------------------------------------------------


def work(options):
    """One allocator's process: cases from `--start` on, a line of JSON each."""
    global torch
    import torch

    a = Allocator(options.library, options.settings, options.shim)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.ones(1, device="cuda")
    for number, function in enumerate(CASES):
        if number < options.start or options.only not in function.__name__:
            continue
        print(json.dumps({"begins": number}), flush=True)
        torch.cuda.set_stream(torch.cuda.default_stream())
        start, fatal = time.perf_counter(), False
        try:
            note, passed = function(a), True
            torch.cuda.synchronize()
        except BaseException as e:  # noqa: BLE001: every failure is a row of the table
            passed, note = False, f"{type(e).__name__}: {e}".replace("\n", " ")[:600]
            import traceback

            traceback.print_exc()
            try:
                torch.cuda.synchronize()
                assert (torch.ones(8, device="cuda") + 1).sum().item() == 16
            except BaseException:  # noqa: BLE001: the context is spoiled
                fatal = True
        gc.collect()
        row = {"case": number, "passed": passed, "note": note or "", "seconds": round(time.perf_counter() - start, 3)}
        print(json.dumps(row), flush=True)
        if fatal:
            sys.stdout.flush()
            os._exit(3)
    sys.stdout.flush()
    # What is left is torch's business at exit, too.
    print(json.dumps({"end": True}), flush=True)


def run(options, library, log):
    """All cases on one allocator, starting again after a process that died."""
    rows, start, wanted = {}, 0, [i for i, c in enumerate(CASES) if options.only in c.__name__]
    exit_code = None
    while start < len(CASES):
        command = [sys.executable, os.path.abspath(__file__), library or "", "--worker", "--start", str(start)]
        command += ["--settings", options.settings, "--only", options.only, "--shim", options.shim]
        ended, begun = False, None
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        for line in process.stdout:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            begun = row.get("begins", begun)
            if "case" in row:
                rows[row["case"]] = row
            ended = ended or "end" in row
        exit_code = process.wait()
        if ended:
            break
        if begun is None:
            return rows, f"the process ended with {exit_code} before the first case"
        rows.setdefault(begun, {"case": begun, "passed": False, "note": f"the process died ({exit_code})", "seconds": 0})
        start = begun + 1
    missing = [i for i in wanted if i not in rows]
    end = "" if exit_code == 0 else f"the process ended with {exit_code}"
    return rows, end if not missing else f"{end}; not run: {missing}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--settings", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", default="")
    parser.add_argument("--log", default="", help="where what the cases print goes")
    parser.add_argument("--shim", default="", help="a shim that was built before")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    if not options.shim:
        sys.path.insert(0, MODULE)
        import gpupool_torch

        options.shim = gpupool_torch.build_shim(options.library)
    with open(options.log or os.devnull, "w") as log:
        started = time.time()
        native, native_end = run(options, "", log)
        middle = time.time()
        ours, end = run(options, os.path.abspath(options.library), log)
        times = (middle - started, time.time() - middle)
    verdict = lambda rows, i: "-" if i not in rows else "passed" if rows[i]["passed"] else "FAILED"
    print(f"{'case':<70} {'torch':>7} {'gpupool':>8}")
    counts = [0, 0]
    for i, function in enumerate(CASES):
        if i not in native and i not in ours:
            continue
        counts[0] += verdict(native, i) == "passed"
        counts[1] += verdict(ours, i) == "passed"
        note = ours.get(i, {}).get("note", "")
        theirs = native.get(i, {})
        print(f"{function.__name__:<70} {verdict(native, i):>7} {verdict(ours, i):>8}  {note}")
        if theirs and not theirs["passed"]:
            print(f"{'':<70} torch's own: {theirs['note']}")
    total = len(set(native) | set(ours))
    print(f"{total} cases: {counts[1]} passed on gpupool ({options.settings or 'default settings'}, {times[1]:.0f} s), "
          f"{counts[0]} on torch's own ({times[0]:.0f} s)")
    for name, said in (("gpupool", end), ("torch", native_end)):
        if said:
            print(f"{name}: {said}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"cases": [c.__name__ for c in CASES], "torch": native, "gpupool": ours, "end": [native_end, end]}, f)
    return 1 if counts[1] < total or end else 0


if __name__ == "__main__":
    sys.exit(main())
