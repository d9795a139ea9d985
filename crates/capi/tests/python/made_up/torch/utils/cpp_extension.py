import os

# The folder of the made-up c10, and a library folder that has nothing but an empty libc10.
_here = os.path.dirname(os.path.abspath(__file__))


def include_paths():
    return [os.path.normpath(os.path.join(_here, "..", ".."))]


def library_paths():
    return [os.environ["MADE_UP_C10"]]
