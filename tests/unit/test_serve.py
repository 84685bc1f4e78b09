"""What the daemon's process is set to before its event loop begins."""

from __future__ import annotations

import json
import subprocess
import sys

#: sizes of one buffer that is freed, and of the next one; where the next one lies in the heap, its
#: bytes are not among those that are mapped by themselves.
ASK = """
import ctypes, json, sys
from evald import serve

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

ask = ctypes.CDLL(None).mallinfo2
ask.restype = Mallinfo
if sys.argv[1] == "set":
    serve._give_memory_back()
large = bytearray(8 << 20)
del large
before = ask().hblkhd
large = bytearray(4 << 20)
print(json.dumps(ask().hblkhd - before))
"""


def mapped_bytes(how: str) -> int:
    result = subprocess.run([sys.executable, "-c", ASK, how], check=True, stdout=subprocess.PIPE)
    return int(json.loads(result.stdout))


def test_a_large_buffer_leaves_no_hole_in_the_heap() -> None:
    assert mapped_bytes("unset") == 0  # as glibc does it by itself
    assert mapped_bytes("set") >= 4 << 20
