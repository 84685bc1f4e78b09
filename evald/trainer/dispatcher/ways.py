"""How a training job reaches the daemon: whom it asks, and how snapshots get there."""

from __future__ import annotations

import msgspec
import structlog

from evald.errors import EvaldError
from evald.trainer.contract import Carrier, Link
from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.courier import Courier
from evald.trainer.dispatcher.place import Place, far_place
from evald.trainer.links.file_link import FileLink
from evald.trainer.values import AnyPath

log = structlog.get_logger(__name__)


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """How the job reaches the daemon, as it was told; only rank 0 builds any of it.

    Raises ValueError for ways that contradict each other.
    """

    results: AnyPath | None
    url: str | None
    token: str | None
    token_file: AnyPath | None
    destination: str | None
    link: Link | None
    carrier: Carrier | None

    def __post_init__(self) -> None:
        """Check them."""
        asked = {"results": self.results, "url": self.url, "link": self.link}
        ways = [name for name, value in asked.items() if value is not None]
        if len(ways) > 1:
            raise ValueError(f"cannot ask evald by {' and '.join(ways)} at once: give one of them")
        token = self.token if self.token is not None else self.token_file
        if token is not None and self.url is None:
            raise ValueError("cannot use a token without url: it is for the daemon's HTTP API")
        if self.destination is not None and self.carrier is not None:
            raise ValueError("cannot use destination and carrier at once: give one of them")
        far_host = self.destination is not None and _is_far(self.destination)
        if (self.carrier is not None or far_host) and self.url is None and self.link is None:
            raise ValueError(
                "cannot know what becomes of snapshots on another host: give url, the daemon's "
                "HTTP API, and its token"
            )

    @property
    def far(self) -> bool:
        """Whether the daemon may be on another host, with other paths."""
        return any(way is not None for way in (self.destination, self.carrier, self.url))

    def place(self, arguments: Arguments) -> Place:
        """Return where the daemon looks: a spool is not it."""
        if self.destination is not None:
            if _is_far(self.destination):
                return far_place(self.destination)
            from evald.trainer.push.plan import shared_root  # noqa: PLC0415 - one host does without

            return Place(shared_root(self.destination))
        return Place(None if self.carrier is not None else arguments.root)

    def make_link(self, arguments: Arguments) -> Link:
        """Build the way to ask; raises ValueError or EvaldError for a bad URL or token.

        A token that the daemon refuses is told now; a daemon that is not there yet is no error.
        """
        if self.link is not None:
            return self.link
        if self.url is None:
            link = FileLink(self.place(arguments).path or arguments.root, self.results)
            if link.ledger is not None and not link.ledger.parent.is_dir():
                log.warning(
                    "no_results_there",
                    results=str(self.results),
                    detail=f"there is no directory {link.ledger.parent}: no record comes from it "
                    "until evald makes it; give the daemon's [results] dir, or leave results out",
                )
            return link
        from evald.trainer.links.http_link import HttpLink  # noqa: PLC0415 - one host does without

        http = HttpLink(self.url, self.token, self.token_file)
        try:
            http.check()
        except EvaldError as error:
            http.close()
            raise ValueError(str(error)) from error
        return http

    def make_courier(self, arguments: Arguments, link: Link) -> Courier | None:
        """Build the way for snapshots; None: the root is the daemon's own.

        Raises ValueError for a destination that is none, EvaldError where a program is missing.
        """
        carrier = self.carrier
        if self.destination is not None:
            from evald.trainer.push import carrier_for  # noqa: PLC0415 - one host does without

            carrier = carrier_for(
                self.destination, root=arguments.root, marker=arguments.marker, link=link
            )
        if carrier is None:
            return None
        return Courier(carrier, arguments.root, marker=arguments.marker)


def _is_far(destination: str) -> bool:
    """Tell whether a destination names a host; else it is a directory that is seen from here."""
    return ":" in destination.partition("/")[0]
