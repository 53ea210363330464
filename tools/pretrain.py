"""`megalite train`, under the name that users of other frameworks look for."""

import sys

from megalite.cli.main import main

main(["train", *sys.argv[1:]])
