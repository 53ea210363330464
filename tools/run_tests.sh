#!/usr/bin/env bash
# All tests, with a given Python, in three lanes side by side: one of those that wait (for Slurm, processes that are
# started and killed, disks), two that compute. On six cores or more each lane has a third of the cores, so that a test
# finds there what it finds on a machine of its own; on fewer all have all, and those that compute stand back. What a
# lane said is shown when all have ended, but for the last one's, which is seen as it comes.
#
#   tools/run_tests.sh .venv/bin/python [options of pytest]
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

# By measured times: all lanes take about as long. The last one has what is named in neither of these.
waiting=(slurm faults stations cli report tokenizer data corpus fuzz end_to_end monitor sweeps ladder studies planner)
computing=(stand_in model train layers optim parallel)
waiting=("${waiting[@]/#/tests/}") computing=("${computing[@]/#/tests/}")

# Once for all processes that tests start: hundreds, of which each would compile for itself where none may write it down
"$python" -m compileall -q megalite tests tools

if [ "$(nproc)" -lt 2 ]; then
    exec "$python" -m pytest "$@"
fi
read -r -d '' thirds <<'END'
import os
cores = sorted(os.sched_getaffinity(0))
size = len(cores) // 3
for third in (cores[:size], cores[size : 2 * size], cores[2 * size :]):
    print(",".join(map(str, third)))
END
first=() second=(nice -n 5) third=(nice -n 5)
if [ "$(nproc)" -ge 6 ] && command -v taskset >/dev/null; then
    { read -r a; read -r b; read -r c; } < <("$python" -c "$thirds")
    first=(taskset -c "$a") second=(taskset -c "$b") third=(taskset -c "$c")
fi
said=$(mktemp -d)
lanes=()
end() {
    for lane in "${lanes[@]}"; do kill -INT -- "-$lane" 2>/dev/null; done
    rm -rf "$said"
}
trap end EXIT
trap 'exit 130' INT TERM

set -m # a group of its own for each lane, so that it can be ended with all that it started
"${first[@]}" "$python" -m pytest -p no:cacheprovider "$@" "${waiting[@]}" >"$said/waiting" 2>&1 </dev/null &
lanes+=($!)
"${second[@]}" "$python" -m pytest -p no:cacheprovider "$@" "${computing[@]}" >"$said/computing" 2>&1 </dev/null &
lanes+=($!)
set +m
"${third[@]}" "$python" -m pytest "$@" "${waiting[@]/#/--ignore=}" "${computing[@]/#/--ignore=}"
code=$?
for lane in "${lanes[@]}"; do
    wait "$lane"
    ended=$?
    code=$((code ? code : ended))
done
lanes=()
cat "$said/waiting" "$said/computing"
exit "$code"
