"""`python -m service` is the command `baton`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    # Before any other import: those would fail on an old Python with a traceback.
    sys.stderr.write("baton: Python 3.11 or newer is needed, this is %d.%d\n" % sys.version_info[:2])  # noqa: UP031
    sys.exit(2)

from service.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
