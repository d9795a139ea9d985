"""What gpupool_torch.py uses of PyTorch, for a test without it: records what is set."""

import ctypes
import types

__version__ = "0.0+made.up"
SETTERS = ["set_init_fn", "set_reset_fn", "set_memory_fraction_fn", "set_base_alloc_fn", "set_record_stream_fn",
           "set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool"]
hooks = {}
current = []
in_use = False


class _PlugIn:
    def __getattr__(self, name):
        if name not in SETTERS:
            raise AttributeError(name)
        return lambda address: hooks.__setitem__(name, address)


class CUDAPluggableAllocator:
    def __init__(self, path, malloc, free):
        library = ctypes.CDLL(path)
        self.functions = getattr(library, malloc), getattr(library, free)

    def allocator(self):
        return _PlugIn()


def _change(allocator):
    if in_use:
        raise RuntimeError("Can't swap an already initialized allocator")
    current.append(allocator)


_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
memory = types.SimpleNamespace(CUDAPluggableAllocator=CUDAPluggableAllocator, change_current_allocator=_change)
cuda = types.SimpleNamespace(memory=memory, current_device=lambda: 0)
