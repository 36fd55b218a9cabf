"""Commands of the project; each one is a file without an extension beside this one."""

import sys

# Before any other import: the modules below use syntax that an older Python stops at.
if sys.version_info < (3, 10):  # noqa: UP036
    raise SystemExit(
        "error: this needs Python 3.10 to 3.13 and was started with "
        + sys.version.split()[0]
        + ". Start it with one of those, for example `python3.11 scripts/test`."
    )
