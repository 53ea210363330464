"""`megalite data clean`, under the name that users of other frameworks look for."""

import sys

from megalite.cli.main import main

main(["data", "clean", *sys.argv[1:]])
