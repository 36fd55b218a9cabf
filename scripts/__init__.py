"""The project's commands: each is a file without an extension in this folder."""

import sys

# Check before any other import: the modules use syntax that an older Python cannot parse.
if sys.version_info < (3, 10):  # noqa: UP036
    raise SystemExit(
        "error: this needs Python 3.10 to 3.13 and was started with "
        + sys.version.split()[0]
        + ". Start it with one of those, for example `python3.11 scripts/test`."
    )
