"""A door: `python tools/convert_from_hf.py FOLDER OUT` is `megalite convert from-hf FOLDER OUT`."""

import sys

from megalite.cli.main import main

main(["convert", "from-hf", *sys.argv[1:]])
