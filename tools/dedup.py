"""`megalite data dedup`, under the name that users of other frameworks look for."""

import sys

from megalite.cli.main import main

main(["data", "dedup", *sys.argv[1:]])
