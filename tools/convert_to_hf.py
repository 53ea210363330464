"""A door: `python tools/convert_to_hf.py CKPT OUT` is `megalite convert to-hf CKPT OUT`."""

import sys

from megalite.cli.main import main

main(["convert", "to-hf", *sys.argv[1:]])
