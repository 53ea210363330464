#!/usr/bin/env bash
# All tests, with a given Python. On four cores or more in two lanes side by side, each on half of the cores, so that a
# test finds there what it finds on a machine of its own. What the first lane said is shown when both have ended.
#
#   tools/run_tests.sh .venv/bin/python
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1

read -r -d '' halves <<'END'
import os
cores = sorted(os.sched_getaffinity(0))
for half in (cores[: len(cores) // 2], cores[len(cores) // 2 :]):
    print(",".join(map(str, half)))
END
if [ "$(nproc)" -lt 4 ] || ! command -v taskset >/dev/null; then
    exec "$python" -m pytest
fi
{ read -r some; read -r others; } < <("$python" -c "$halves")

first=(tests/slurm tests/corpus tests/tokenizer tests/data tests/fuzz tests/report tests/train)
said=$(mktemp)
trap 'rm -f "$said"; [ -z "${lane:-}" ] || kill -INT -- "-$lane" 2>/dev/null' EXIT
trap 'exit 130' INT TERM

set -m # a group of its own, so that it can be ended with all that it started
taskset -c "$some" "$python" -m pytest -p no:cacheprovider "${first[@]}" >"$said" 2>&1 </dev/null &
lane=$!
set +m
taskset -c "$others" "$python" -m pytest "${first[@]/#/--ignore=}"
second_code=$?
wait "$lane"
first_code=$?
lane=
cat "$said"
exit $((first_code ? first_code : second_code))
