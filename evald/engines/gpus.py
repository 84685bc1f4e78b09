"""The GPUs of this node: what nvidia-smi tells, which of them are ours, and who sits on them.

A GPU is known by its UUID, because its number depends on who counts. SGLang is given the number
all the same, in the order of the PCI bus: it does not take a UUID for the fast all-reduce of its
tensor parallel ranks, and turns that off with a warning in the log.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from evald.errors import EvaldError

NVIDIA_SMI = "nvidia-smi"
#: it takes milliseconds, and seconds where no driver stays loaded.
TIMEOUT_S = 30.0
_FORMAT = "--format=csv,noheader"
_GPUS = "--query-gpu=index,uuid"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
#: shares a GPU between processes, and computes nothing itself.
_NOT_FOREIGN = "nvidia-cuda-mps-server"


class GpuProblem(EvaldError):
    """GPUs cannot be used: one sentence."""


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that computes on a GPU, as nvidia-smi shows it."""

    gpu: str
    pid: str
    #: with its unit, ``1634 MiB``; in containers often ``[N/A]``.
    memory: str
    name: str


def parse_gpus(text: str) -> dict[str, str]:
    """Read ``index, uuid`` lines: number -> UUID."""
    rows = (line.split(",", 1) for line in text.splitlines() if "," in line)
    return {number.strip(): uuid.strip() for number, uuid in rows}


def parse_processes(text: str) -> list[GpuProcess]:
    """Read ``gpu_uuid, pid, used_memory, process_name`` lines."""
    processes = []
    for line in text.splitlines():
        gpu, *rest = [part.strip() for part in line.split(",", 3)]
        if len(rest) == 3:  # noqa: PLR2004 - pid, memory and name; else a message, no row
            pid, memory, name = rest
            processes.append(GpuProcess(gpu=gpu, pid=pid, memory=memory, name=name))
    return processes


def visible_gpus(visible: str | None, known: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that the daemon may use, in order: UUIDs where ``known`` (number -> UUID).

    ``visible``: the daemon's own CUDA_VISIBLE_DEVICES. None: nobody can tell how many there are.
    """
    if visible is None:
        return list(known.values()) if known else None
    gpus = []
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry.startswith("-") or (known and _uuid(entry, known) is None):
            break  # as CUDA does: what follows an entry that is none does not count
        gpus.append(_uuid(entry, known) or entry)
    return gpus


def device_list(gpus: Sequence[str], known: Mapping[str, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for ``gpus``: numbers where they have one. Raises GpuProblem."""
    numbers = {uuid: number for number, uuid in known.items()}
    lost = [gpu for gpu in gpus if gpu.startswith("GPU-") and known and gpu not in numbers]
    if lost:
        raise GpuProblem(
            f"cannot use GPU {lost[0]}: nvidia-smi does not list it any more; look into dmesg"
        )
    return ",".join(numbers.get(gpu, gpu) for gpu in gpus)


def foreign_sentences(
    gpus: Sequence[str], processes: Sequence[GpuProcess], known: Mapping[str, str]
) -> list[str]:
    """Return one sentence for each of ``gpus`` on which somebody else computes."""
    numbers = {uuid: number for number, uuid in known.items()}
    sentences = []
    for gpu in gpus:
        uuid = _uuid(gpu, known) or gpu
        users = [p for p in processes if p.gpu == uuid and not p.name.endswith(_NOT_FOREIGN)]
        if users:
            who = ", ".join(f"{p.name} (pid {p.pid}, {p.memory})" for p in users)
            name = f"{numbers[uuid]} ({uuid})" if uuid in numbers else gpu
            sentences.append(
                f"GPU {name} is in use by {who}; end that, or leave the GPU out of "
                "CUDA_VISIBLE_DEVICES"
            )
    return sentences


def known_gpus() -> dict[str, str]:
    """Ask nvidia-smi: number -> UUID; empty where there is no nvidia-smi. Blocks.

    Raises GpuProblem when it fails: then no engine could start either.
    """
    return parse_gpus(_ask(_GPUS) or "")


def gpu_processes() -> list[GpuProcess]:
    """Ask nvidia-smi who computes on which GPU; nobody where there is no nvidia-smi. Blocks."""
    return parse_processes(_ask(_PROCESSES) or "")


def claim_gpus(gpus: Sequence[str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for an engine that starts on ``gpus`` now. Blocks.

    Raises GpuProblem when a foreign process sits on one of them, or one of them is gone.
    """
    known = known_gpus()
    foreign = foreign_sentences(gpus, gpu_processes(), known)
    if foreign:
        raise GpuProblem("; ".join(foreign))
    return device_list(gpus, known)


def _uuid(entry: str, known: Mapping[str, str]) -> str | None:
    """Return the UUID behind a number, or behind a beginning that only one UUID has."""
    if entry in known:
        return known[entry]
    if entry.startswith("MIG-"):
        return entry  # a slice of a GPU has no number
    matches = [
        uuid for uuid in known.values() if entry.startswith("GPU-") and uuid.startswith(entry)
    ]
    return matches[0] if len(matches) == 1 else None


def _ask(query: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - fixed words, no shell
            [NVIDIA_SMI, query, _FORMAT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise GpuProblem(
            f"cannot ask {NVIDIA_SMI} for GPUs: no answer within {TIMEOUT_S:g} s; "
            "the driver seems to hang"
        ) from error
    except OSError as error:
        raise GpuProblem(f"cannot run {NVIDIA_SMI}: {error.strerror}") from error
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        cause = (text + done.stderr.decode(errors="replace")).strip().partition("\n")[0]
        raise GpuProblem(
            f"cannot ask {NVIDIA_SMI} for GPUs: {cause or f'exit code {done.returncode}'}"
        )
    return text
