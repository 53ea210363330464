#!/usr/bin/env bash
# All tests, with a given Python. On four cores or more in two lanes side by side: many tests wait for ranks or for a
# cluster, or have a core to themselves. What the first lane said is shown when it has ended.
#
#   tools/run_tests.sh .venv/bin/python
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1

if [ "$(nproc)" -lt 4 ]; then
    exec "$python" -m pytest
fi

first=(tests/slurm tests/data tests/fuzz)
said=$(mktemp)
trap 'rm -f "$said"; [ -z "${lane:-}" ] || kill -INT -- "-$lane" 2>/dev/null' EXIT
trap 'exit 130' INT TERM

set -m # a group of its own, so that it can be ended with all that it started
"$python" -m pytest -p no:cacheprovider "${first[@]}" >"$said" 2>&1 &
lane=$!
set +m
"$python" -m pytest "${first[@]/#/--ignore=}"
second_code=$?
wait "$lane"
first_code=$?
lane=
cat "$said"
exit $((first_code ? first_code : second_code))
