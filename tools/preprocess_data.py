"""`megalite data tokenize`, under the name that users of other frameworks look for."""

import sys

from megalite.cli.main import main

main(["data", "tokenize", *sys.argv[1:]])
