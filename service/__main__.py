"""Runs the command `baton` as `python -m service`."""

import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    # Check this before any other import, because other imports fail on an old Python with a traceback.
    sys.stderr.write("baton: Python 3.11 or newer is needed, this is %d.%d\n" % sys.version_info[:2])  # noqa: UP031
    sys.exit(2)

if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    # `python -m` puts the current folder first on the import path, where a file could shadow a module of its name.
    del sys.path[0]

from service.cli import main

if __name__ == "__main__":
    sys.exit(main())
