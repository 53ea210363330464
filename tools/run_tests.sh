#!/usr/bin/env bash
# All tests, with a given Python, in two lanes side by side: those that wait (for Slurm, processes that are started and
# killed, disks) and those that compute. On four cores or more each lane has half of the cores, so that a test finds
# there what it finds on a machine of its own; on fewer both have all, and the computing lane stands back. What the first
# lane said is shown when both have ended.
#
#   tools/run_tests.sh .venv/bin/python [options of pytest]
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

# By measured times: both lanes take about as long.
waiting=(tests/slurm tests/faults tests/stations tests/cli tests/report)
waiting+=(tests/tokenizer tests/data tests/corpus tests/fuzz tests/checkpoint tests/end_to_end)
waiting+=(tests/stand_in tests/monitor tests/planner tests/sweeps tests/ladder tests/studies tests/model)

read -r -d '' halves <<'END'
import os
cores = sorted(os.sched_getaffinity(0))
for half in (cores[: len(cores) // 2], cores[len(cores) // 2 :]):
    print(",".join(map(str, half)))
END
first=() second=()
if [ "$(nproc)" -lt 2 ]; then
    exec "$python" -m pytest "$@"
elif [ "$(nproc)" -lt 4 ] || ! command -v taskset >/dev/null; then
    second=(nice -n 5)
else
    { read -r some; read -r others; } < <("$python" -c "$halves")
    first=(taskset -c "$some") second=(taskset -c "$others")
fi
said=$(mktemp)
trap 'rm -f "$said"; [ -z "${lane:-}" ] || kill -INT -- "-$lane" 2>/dev/null' EXIT
trap 'exit 130' INT TERM

set -m # a group of its own, so that it can be ended with all that it started
"${first[@]}" "$python" -m pytest -p no:cacheprovider "$@" "${waiting[@]}" >"$said" 2>&1 </dev/null &
lane=$!
set +m
"${second[@]}" "$python" -m pytest "$@" "${waiting[@]/#/--ignore=}"
second_code=$?
wait "$lane"
first_code=$?
lane=
cat "$said"
exit $((first_code ? first_code : second_code))
