"""`megalite train`, for launchers that want a script: torchrun --nproc-per-node=8 launch/launch.py CONFIG.yaml"""

import sys

from megalite.cli.main import main

main(["train", *sys.argv[1:]])
