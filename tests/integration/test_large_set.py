"""A set with many long responses: they go to disk as they come, and never fill the memory."""

from __future__ import annotations

from pathlib import Path

from rig import Rig, rig, until

from evald.testing import write_base_model, write_fake_python, write_snapshot

RESPONSE_CHARS = 20_000
QUESTIONS = 800


def peak_bytes(r: Rig) -> int:
    """The daemon's own memory at its highest, by the kernel's book."""
    assert r.daemon is not None
    status = Path(f"/proc/{r.daemon.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def libraries(r: Rig) -> str:
    """What the daemon's own process has loaded; a tokenizer is larger than all that it needs."""
    assert r.daemon is not None
    return Path(f"/proc/{r.daemon.pid}/maps").read_text()


def test_long_responses_stream_to_disk_and_a_resume_does_not_hold_them(tmp_path: Path) -> None:
    model = write_base_model(tmp_path / "base", max_position_embeddings=32768)
    python = write_fake_python(tmp_path / "python", response_chars=RESPONSE_CHARS)
    with rig(tmp_path, python=python, model=model, questions=QUESTIONS) as r:
        text = r.config.read_text()
        r.config.write_text(text.replace("max_response_len = 16", "max_response_len = 30000"))
        r.start()
        idle = peak_bytes(r)
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        folder = r.work / "results" / "samples" / "t" / "step_1.r0"
        sizes: list[int] = []

        def growing() -> bool:
            size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
            if size and (not sizes or size > sizes[-1]):
                sizes.append(size)
            return size > 1.5 * QUESTIONS * RESPONSE_CHARS

        until(growing, "most of the responses are on disk")
        assert len(sizes) > 5
        assert r.points() == []
        r.kill()
        r.start()
        point = r.point(1)
        assert (point.outcome, point.counts.n_scored) == ("ok", 2 * QUESTIONS)
        assert point.counts.n_resumed > QUESTIONS
        assert "tokenizers" not in libraries(r)
        # what evaluating needs at all is less than all responses, and they are not in it
        assert peak_bytes(r) - idle < 2 * QUESTIONS * RESPONSE_CHARS
