"""``[blackbox] command``: one process for each point; its exit code says how that went."""

from __future__ import annotations

import asyncio

from evald.config import BlackBox
from evald.engines.own_socket import how_it_ended
from evald.engines.process_log import last_words
from evald.errors import EvaldError, EvalSkip
from evald.point import SkipReason
from evald.postures.blackbox.config import fill_in
from evald.postures.blackbox.process import Request, Room
from evald.postures.blackbox.results import Skipped, read_skip, skipped

#: exit code by which a command says that it gives no score (sysexits.h EX_TEMPFAIL).
EXIT_SKIP = 75
#: reason of that exit code when the command has written none.
REASON_SKIP = "declined"


class CommandBox:
    """Runs the command once for each point."""

    def __init__(self, config: BlackBox, room: Room) -> None:
        self._room = room
        self._command = config.command or []

    async def warm_up(self) -> None:
        """Nothing can be done before there is a snapshot."""

    def leave(self) -> None:
        """Have the running command end."""
        self._room.leave()

    async def ask(self, request: Request) -> Skipped | None:
        """Run the command to its end; None when it succeeded. Raises EvalSkip "crashed"."""
        key = request.point.key
        argv = fill_in(
            self._command,
            {
                "dir": str(request.point.snapshot.directory),
                "step": str(key.step),
                "run": key.run,
                "revision": str(key.revision),
                "output": str(request.output),
                "output_dir": str(request.output_dir),
                "record_id": key.record_id,
            },
        )
        try:
            process = await self._room.start(argv)
        except (EvaldError, OSError) as error:
            raise EvalSkip(f"cannot start {argv[0]}: {error}", reason=SkipReason.CRASHED) from error
        returncode = await process.wait()
        # what it has left in the background must neither write nor hold a GPU any longer
        self._room.leave()
        await self._room.empty()
        if returncode == EXIT_SKIP:
            written = await asyncio.to_thread(read_skip, request.output_dir)
            words = await asyncio.to_thread(last_words, process.log_path)
            return written or skipped(REASON_SKIP, f"exit code {EXIT_SKIP}: {words}")
        if returncode != 0:
            raise EvalSkip(await how_it_ended(process), reason=SkipReason.CRASHED)
        return None
