#!/usr/bin/env bash
# compute-sanitizer over all GPU tests: one line per tool, test file and share of it, the whole logs in a folder.
#
#     scripts/sanitize.sh [-o logs] [-j jobs] [-s shares] [memcheck racecheck initcheck synccheck]
#     scripts/sanitize.sh -l              # the test files, and nothing else
#
# Jobs take the machine's GPUs in turn; -s cuts every file into shares that run side by side. Exit code 1 when a tool
# reports an error, a test fails, a run ends early or no test of a file ran. The tests see the tool in CUTEFUSE_SANITIZED: they
# crop images, channels and rows, as every access costs up to a hundred times more here, and leave out what measures time.
set -uo pipefail
cd "$(dirname "$0")/.."

logs=sanitizer_logs jobs=4 shares=1 limit=${SANITIZE_LIMIT:-1800}
# Files marked `gpu`. Those marked `torch` as well time whole networks, which means nothing here.
files=${SANITIZE_FILES:-$(grep -lE '^(pytestmark = \[?|@)pytest\.mark\.gpu' tests/test_*.py |
  xargs grep -LE '^pytestmark = .*pytest\.mark\.torch')}
while getopts lo:j:s: flag; do
  case $flag in
    l) echo "$files" && exit ;;
    o) logs=$OPTARG ;;
    j) jobs=$OPTARG ;;
    s) shares=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
tools=("${@:-memcheck racecheck initcheck synccheck}")
command -v compute-sanitizer >/dev/null || {
  echo "sanitize: compute-sanitizer is not on PATH; install the CUDA toolkit" >&2
  exit 2
}
mkdir -p "$logs"
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
gpus=$((gpus > 0 ? gpus : 1))

# References are computed on the CPU, by many jobs side by side: one thread each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# initcheck has to see who wrote a buffer, so it follows every kernel; the other tools follow ours.
one() {
  local tool=$1 file=$2 share=$3 name=$1_$(basename "$2" .py)_${3%/*} follow=(--kernel-name kernel_substring=cutefuse)
  [ "$tool" = initcheck ] && follow=()
  SECONDS=0
  CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$((SLOT % gpus))} CUTEFUSE_SANITIZED=$tool PYTHONPATH=.:tests timeout "$limit" \
    compute-sanitizer --tool "$tool" "${follow[@]}" --print-limit 5 --error-exitcode 3 \
    "${PYTHON:-python3}" -m pytest -v -m gpu -p no:cacheprovider --durations=10 --share "$share" "$file" >"$logs/$name.log" 2>&1
  local code=$? counts
  counts=$(grep -oE '[0-9]+ (passed|failed|skipped).* in' "$logs/$name.log" | tail -1)
  [[ $code -eq 0 && $counts != *passed* ]] && code=4 # nothing ran
  printf '%-9s %-28s %-5s exit %-3d %4d s  %s  %s\n' "$tool" "$(basename "$file")" "$share" $code $SECONDS "$counts" \
    "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$name.log" | tail -1)"
  return $code
}
export -f one
export logs limit gpus

# shellcheck disable=SC2068
for tool in ${tools[@]}; do
  for file in $files; do
    for share in $(seq "$shares"); do printf '%s %s %s/%s\n' "$tool" "$file" "$share" "$shares"; done
  done
done | xargs -P "$jobs" --process-slot-var=SLOT -L 1 bash -c 'one "$@"' _ || exit 1
