"""A far host for push tests: a real sshd of the test's own, and network namespaces around it."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rig import until

SSHD = "/usr/sbin/sshd"
LOOPBACK = "127.0.0.1"
#: addresses that are kept for documentation: they exist inside the namespaces only.
EVAL_NODE, TRAINER = "192.0.2.1", "192.0.2.2"
_CONFIG = """
Port {port}
ListenAddress {address}
HostKey {work}/host_key
PidFile none
AuthorizedKeysFile {work}/client_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""


class FarHost:
    """Where a running sshd is reached: ``ssh`` are the words that reach it."""

    def __init__(self, work: Path, address: str, port: int) -> None:
        self.host = f"{pwd.getpwuid(os.geteuid()).pw_name}@{address}"
        self.ssh = ["ssh", "-F", "/dev/null", "-p", str(port), "-i", f"{work}/client_key"]
        for option in (f"UserKnownHostsFile={work}/known_hosts", "IdentitiesOnly=yes"):
            self.ssh += ["-o", option]

    def destination(self, root: Path) -> str:
        """The root as ``evald push`` takes it."""
        return f"{self.host}:{root}"


@contextmanager
def far_host(
    work: Path, *, address: str = LOOPBACK, before: Sequence[str] = ()
) -> Iterator[FarHost]:
    """Serve ssh from keys and a config made in ``work``; ``before``: a program that starts it."""
    for key in ("host_key", "client_key"):
        if not (work / key).exists():
            made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(work / key)]
            subprocess.run(made, check=True, timeout=30)
    port = _free_port()
    (work / "sshd_config").write_text(_CONFIG.format(port=port, work=work, address=address))
    host_key = (work / "host_key.pub").read_text().split()[:2]
    (work / "known_hosts").write_text(f"[{address}]:{port} {' '.join(host_key)}\n")
    if os.geteuid() == 0:  # its privilege separation wants this directory
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (work / "sshd.log").open("ab") as log:
        server = subprocess.Popen(
            [*before, SSHD, "-D", "-e", "-f", str(work / "sshd_config")], stdout=log, stderr=log
        )
    try:
        ready = f"Server listening on {address} port {port}"
        until(
            lambda: ready in (work / "sshd.log").read_text() or server.poll() is not None,
            "sshd listens",
        )
        assert server.poll() is None, (work / "sshd.log").read_text()
        yield FarHost(work, address, port)
    finally:
        server.terminate()
        server.wait(10)


_LOCAL_SSH = """#!/bin/sh
while [ "$1" = -o ] || [ "$1" = -l ]; do shift 2; done
shift
exec {before} sh -c "$*"
"""


class NearHost(FarHost):
    """This machine, asked as a far one is, through a stand-in of ssh that runs the words at once.

    For all that has nothing to do with ssh itself: a connection costs half a second on two cores.
    ``before``: a program that starts the words.
    """

    def __init__(self, work: Path, before: str = "") -> None:
        shell = work / "local-ssh"
        shell.write_text(_LOCAL_SSH.format(before=before))
        shell.chmod(0o755)
        self.host = "user@near"
        self.ssh = [str(shell)]


class TwoHosts:
    """Words that start a program on the eval node or at the trainer, and the node's address."""

    def __init__(self, eval_node: list[str], trainer: list[str], address: str) -> None:
        self.eval_node = eval_node
        self.trainer = trainer
        self.address = address


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Give two network namespaces with a cable between them; loopback where that is not allowed."""
    label = secrets.token_hex(3)
    node, trainer = f"evald-node-{label}", f"evald-train-{label}"
    with ExitStack() as stack:
        for name in (node, trainer):
            if not _ip("netns", "add", name):
                print("no network namespaces on this machine: both hosts are its loopback")
                yield TwoHosts([], [], LOOPBACK)
                return
            stack.callback(_ip, "netns", "delete", name)
        cable = ("type", "veth", "peer", "name", "evald0", "netns", trainer)
        assert _ip("-n", node, "link", "add", "evald0", *cable)
        for name, address in ((node, EVAL_NODE), (trainer, TRAINER)):
            assert _ip("-n", name, "address", "add", f"{address}/24", "dev", "evald0")
            for device in ("evald0", "lo"):
                assert _ip("-n", name, "link", "set", device, "up")
        inside = ["ip", "netns", "exec"]
        yield TwoHosts([*inside, node], [*inside, trainer], EVAL_NODE)


def _ip(*words: str) -> bool:
    try:
        done = subprocess.run(
            ["ip", *words], capture_output=True, text=True, check=False, timeout=30
        )
    except FileNotFoundError:
        return False
    if done.returncode:
        print(done.stderr)
    return done.returncode == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
