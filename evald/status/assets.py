"""The files of the status page: no data, so that they are served without a token."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec
from aiohttp import web

#: the page may load and do nothing but this; prompts and responses are hostile text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for each time, answered with 304
}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class _Asset(msgspec.Struct, frozen=True):
    content: bytes
    content_type: str
    etag: str


def is_asset(path: str) -> bool:
    """Tell whether a path is answered with a file of the page."""
    return path == "/" or path.startswith("/assets/")


class Assets:
    """Serves ``GET /`` and ``GET /assets/NAME``; the files are read at the first request."""

    def __init__(self) -> None:
        self._files: dict[str, _Asset] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/", self._answer), web.get("/assets/{name:.+}", self._answer)]

    async def _answer(self, request: web.Request) -> web.Response:
        if not self._files:
            self._files = dict(_read(page_dir()))
        asset = self._files.get(request.match_info.get("name", "index.html"))
        if asset is None:
            return web.Response(status=404, text="cannot answer: the page has no such file\n")
        headers = {**_HEADERS, "ETag": asset.etag}
        if request.headers.get("If-None-Match") == asset.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=asset.content,
            content_type=asset.content_type,
            charset="utf-8",
            headers=headers,
        )


def page_dir() -> Traversable:
    """Return the directory of the page's files."""
    return resources.files("evald.status") / "page"


def _read(directory: Traversable, prefix: str = "") -> list[tuple[str, _Asset]]:
    """Read what the page may ask for, by name; a few files, 150 kB."""
    found = []
    for path in directory.iterdir():
        suffix = path.name.rpartition(".")[2]
        if path.is_dir():
            found += _read(path, f"{prefix}{path.name}/")
        elif suffix in _TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found.append((prefix + path.name, _Asset(content, _TYPES[suffix], etag)))
    return found
