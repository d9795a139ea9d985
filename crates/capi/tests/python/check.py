"""Installs gpupool into a made-up torch, on the simulated device: what is set, what is refused, what the figures say."""

import ctypes
import os
import sys

import torch

import gpupool_torch as g

library, folder = sys.argv[1], sys.argv[2]


def refused(words, **changes):
    arguments = dict(library=library, device_kind="sim") | changes
    try:
        g.install(**arguments)
    except g.Refused as e:
        assert words in str(e), e
    else:
        raise AssertionError(f"not refused: {changes}")
    assert not torch.current and not torch.hooks, "a refusal changes nothing"


refused("cannot be loaded", library="/no/such/library.so")
refused("does not export", library=os.path.join(os.environ["MADE_UP_C10"], "libc10.so"))
refused("cannot be run", compiler="/no/such/compiler")
torch.SETTERS.remove("set_record_stream_fn")
refused("set_record_stream_fn")
torch.SETTERS.append("set_record_stream_fn")
refused("memory_limt", settings="memory_limt=1GiB")
try:
    g.memory_stats()
    raise AssertionError("figures without an allocator")
except RuntimeError as e:
    assert "install()" in str(e)

torch.in_use = True
try:
    g.install(library, device_kind="sim")
    raise AssertionError("not refused")
except g.Refused as e:
    assert "before the first CUDA tensor" in str(e), e
torch.in_use = False
torch.hooks.clear()
g.install(library, settings="memory_limit=1GiB", device_kind="sim")
assert sorted(torch.hooks) == sorted(torch.SETTERS) and all(torch.hooks.values()), torch.hooks
try:
    g.install(library, device_kind="sim")
    raise AssertionError("installed twice")
except g.Refused as e:
    assert "once" in str(e)

# With the shim's copies of C++'s functions in everybody's sight, cuDNN crashed at its first convolution.
everything = ctypes.CDLL(None)
assert not any(hasattr(everything, f"gpupool_{name}") for name in ("shim_malloc", "torch_malloc")), "seen by every library"

malloc, free = torch.current[0].functions
malloc.restype = ctypes.c_void_p
block = malloc(ctypes.c_size_t(3 << 20), 0, ctypes.c_void_p(0))
assert block
stats = g.memory_stats()
assert stats["allocated_bytes.all.current"] >= 3 << 20 and stats["num_ooms"] == 0, stats
base = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))(torch.hooks["set_base_alloc_fn"])
size = ctypes.c_size_t()
assert base(block + 512, ctypes.byref(size)) <= block + 512 < base(block + 512, None) + size.value
free(ctypes.c_void_p(block), ctypes.c_size_t(3 << 20), 0, ctypes.c_void_p(0))
g.reset_peak_memory_stats()
assert g.memory_stats(device=0)["allocated_bytes.all.peak"] == 0
for name in ["state.json", "state.pickle"]:
    g.snapshot(os.path.join(folder, name))
import pickle
with open(os.path.join(folder, "state.pickle"), "rb") as f:
    assert pickle.load(f)["segments"]
g.set_memory_limit(None)
try:
    g.snapshot("/no/such/folder/x")
    raise AssertionError("written")
except RuntimeError as e:
    assert "/no/such/folder" in str(e)
try:
    g.pool_bytes((77, 0))
    raise AssertionError("no such pool")
except RuntimeError as e:
    assert "(77, 0)" in str(e)
ctypes.CFUNCTYPE(None)(torch.hooks["set_reset_fn"])()
assert g.memory_stats()["reserved_bytes.all.current"] == 0
print("all is well")
