"""What happens to files: bits flip, pieces get lost, doubled or replaced."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: a busy machine makes single draws slow; that says nothing about the code.
FUZZ = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
#: what parsers stumble over.
_ODD = [
    *(b"\0", b"\n", b"\r\n", b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"-1", b"1e999"),
    *(b"null", b"NaN", b"true", b"99999999999999999999", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800"),
    *(b'"' + b"x" * 5000 + b'"', b"[" * 3000, b'{"a":' * 3000, b"../../etc", b"/", b"\x1b[31m"),
]


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """Draw what became of ``valid`` after one to four accidents."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 40))
        match draw(st.sampled_from(["flip", "cut", "lose", "double", "insert", "replace"])):
            case "flip" if at < len(content):
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[at:]
            case "lose":
                del content[at : at + length]
            case "double":
                content[at:at] = content[at : at + length]
            case "insert":
                content[at:at] = draw(st.sampled_from(_ODD) | st.binary(max_size=12))
            case "replace":
                odd = draw(st.sampled_from(_ODD) | st.binary(max_size=12))
                content[at : at + length] = odd
            case _:
                pass
    return bytes(content)
