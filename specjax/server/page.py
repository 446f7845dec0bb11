"""GET /: the page for people, one file that loads nothing else."""

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

FILE = Path(__file__).parent / "page.html"


def response() -> Response:
    """The page. Its policy lets the browser run the page's own script, and talk to this server alone."""
    return _response(*_page())


def report(text: str) -> Response:
    """The page of a report. Its charts have styles of their own, which can't be named one by one."""
    return _response(text, policy(text, "'unsafe-inline'"))


def _response(text: str, rules: str) -> Response:
    headers = {
        "Content-Security-Policy": rules,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(text, headers=headers, media_type="text/html")


@functools.cache
def _page() -> tuple[str, str]:
    """The page and its policy. The file is read once."""
    text = FILE.read_text(encoding="utf-8")
    return text, policy(text)


def policy(text: str, styles: str | None = None) -> str:
    """The Content-Security-Policy of a page. It names the page's own script by its hash.

    Args:
      text: the page.
      styles: the styles that are let in. None: the page's own, named by its hash.
    """

    def hashes(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {styles or hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
