"""gpupool as PyTorch's allocator.

    import gpupool_torch
    gpupool_torch.install("path/to/libgpupool_capi.so", settings="memory_fraction=0.9")
    ...                                   # everything of PyTorch's, captures too
    print(gpupool_torch.memory_stats()["reserved_bytes.all.peak"])
    gpupool_torch.snapshot("state.json")  # `gpupool inspect state.json`

Call install() before the first CUDA tensor. It sets every hook that PyTorch lets a plug-in set, and raises Refused, having changed
nothing, where one cannot be set: without record_stream memory is reused too early, without the pool hooks captured graphs are corrupted.

torch.cuda.memory_stats(), memory_allocated(), snapshots and MemPool() raise under any plug-in; the first three are here.
"""

import ctypes
import json
import os
import subprocess
import tempfile

__all__ = ["Refused", "build_shim", "install", "memory_stats", "reset_peak_memory_stats", "snapshot", "set_memory_limit", "pool_bytes"]

# Setter of torch's plug-in object, the function that it gets, and whether the shim has it.
_HOOKS = [
    ("set_init_fn", "gpupool_torch_init", False),
    ("set_reset_fn", "gpupool_torch_reset", False),
    ("set_memory_fraction_fn", "gpupool_torch_memory_fraction", False),
    ("set_base_alloc_fn", "gpupool_torch_base_alloc", False),
    ("set_record_stream_fn", "gpupool_torch_record_stream", False),
    ("set_begin_allocate_to_pool", "gpupool_shim_begin", True),
    ("set_end_allocate_to_pool_fn", "gpupool_torch_end_allocate_to_pool", False),
    ("set_release_pool", "gpupool_torch_release_pool", False),
]

_ABI_MAJOR = 1
_library = None
_kept = []  # What must live as long as the process: PyTorch holds addresses only.


class Refused(RuntimeError):
    """gpupool cannot be PyTorch's allocator here; nothing was changed."""


class _Pool(ctypes.Structure):
    _fields_ = [("capture", ctypes.c_uint64), ("user", ctypes.c_uint64)]


def _address(library, name):
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        raise Refused(f"{library._name} does not export {name}: it is not the library that this module ships with") from None


def _load(path):
    try:
        library = ctypes.CDLL(path)
    except OSError as e:
        raise Refused(f"{path} cannot be loaded: {e}") from e
    _address(library, "gpupool_abi_version")
    library.gpupool_last_error.restype = ctypes.c_char_p
    version = library.gpupool_abi_version() // 1000
    if version != _ABI_MAJOR:
        raise Refused(f"{path} has ABI {version}, this module is for {_ABI_MAJOR}")
    return library


def _check(status):
    if status:
        raise RuntimeError("gpupool: " + _library.gpupool_last_error().decode(errors="replace"))


def _build_shim(torch, library_path, compiler):
    """Compiles shim.cpp against the installed torch; the path of the result."""
    from torch.utils import cpp_extension

    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.cpp")
    folder = tempfile.mkdtemp(prefix="gpupool-shim-")
    result = os.path.join(folder, "libgpupool_shim.so")
    command = [compiler, "-shared", "-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden", "-fvisibility-inlines-hidden", source, "-o", result]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for path in cpp_extension.library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    command += ["-lc10", library_path, f"-Wl,-rpath,{os.path.dirname(library_path)}"]
    try:
        built = subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        raise Refused(f"the shim needs a C++ compiler, and {compiler} cannot be run: {e}") from e
    if built.returncode:
        raise Refused(f"the shim did not compile against torch {torch.__version__}:\n{' '.join(command)}\n{built.stderr}")
    return result


def build_shim(library, compiler=None):
    """Builds the shim, which takes some seconds, by `compiler`, $CXX or g++; the path of the result, for `install(shim=...)` in any process
    with the same torch and library."""
    import torch

    return _build_shim(torch, os.path.abspath(library), compiler or os.environ.get("CXX") or "g++")


def install(library, settings="", shim=None, compiler=None, device_kind="cuda"):
    """Makes gpupool PyTorch's allocator. `library` is the path of libgpupool_capi.so, `settings` as for gpupool_create in gpupool.h
    ("policy=pages; memory_limit=8GiB"), `shim` what `build_shim` gave (else it is built now). `device_kind` is for tests: sim has no GPU."""
    global _library
    import torch

    if _library is not None:
        raise Refused("gpupool was installed in this process already, and PyTorch swaps an allocator once")
    library = os.path.abspath(library)
    loaded = _load(library)
    for _, name, in_shim in _HOOKS:
        if not in_shim:
            _address(loaded, name)
    if shim is None:
        shim = build_shim(library, compiler)
    try:
        # Not global: other libraries would find the shim's copies of C++'s inline functions in place of their own.
        shim_loaded = ctypes.CDLL(shim)
    except OSError as e:
        raise Refused(f"the shim {shim} cannot be loaded: {e}") from e
    allocator = torch.cuda.memory.CUDAPluggableAllocator(shim, "gpupool_shim_malloc", "gpupool_shim_free")
    plug_in = allocator.allocator()
    missing = [setter for setter, _, _ in _HOOKS if not hasattr(plug_in, setter)]
    if missing:
        raise Refused(f"torch {torch.__version__} lets a plug-in not set {', '.join(missing)}")
    if loaded.gpupool_torch_configure(device_kind.encode(), settings.encode()):
        raise Refused(loaded.gpupool_last_error().decode(errors="replace"))
    for setter, name, in_shim in _HOOKS:
        getattr(plug_in, setter)(_address(shim_loaded if in_shim else loaded, name))
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as e:
        raise Refused(f"torch keeps the allocator that it has: {e}; install() before the first CUDA tensor") from e
    _kept.extend([allocator, loaded, shim_loaded])
    _library = loaded
    return allocator


def _allocator(device):
    if _library is None:
        raise RuntimeError("gpupool_torch.install() was not called")
    if device is None:
        import torch

        device = torch.cuda.current_device()
    handle = ctypes.c_uint64()
    _check(_library.gpupool_torch_allocator(ctypes.c_int(int(device)), ctypes.byref(handle)))
    return handle


def memory_stats(device=None):
    """What torch.cuda.memory_stats() would give, under the same names."""
    handle, needed = _allocator(device), ctypes.c_size_t()
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        _check(_library.gpupool_stats_json(handle, buffer, ctypes.c_size_t(size), ctypes.byref(needed)))
        if needed.value <= size:
            return json.loads(buffer.value)
        size = needed.value * 2


def reset_peak_memory_stats(device=None):
    _check(_library.gpupool_reset_peaks(_allocator(device)))


def snapshot(path, device=None):
    """Writes what is held to a file: JSON, or, for a name that ends with .pickle, what torch's memory viewer opens."""
    _check(_library.gpupool_snapshot(_allocator(device), os.fsencode(path)))


def set_memory_limit(size, device=None):
    """Limits what is held to so many bytes; None takes any limit off."""
    limit = (1 << 64) - 1 if size is None else int(size)
    _check(_library.gpupool_set_memory_limit(_allocator(device), ctypes.c_uint64(limit)))


def pool_bytes(pool, device=None):
    """Bytes that a graph's pool (`graph.pool()`) has reserved, and that live blocks of it take."""
    reserved, allocated = ctypes.c_int64(), ctypes.c_int64()
    named = _Pool(*pool)
    _check(_library.gpupool_pool_bytes(_allocator(device), named, ctypes.byref(reserved), ctypes.byref(allocated)))
    return reserved.value, allocated.value
