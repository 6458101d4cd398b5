#!/usr/bin/env bash
# Runs the drill and the audit, and compares what they print with the transcripts in expected/.
#
#   ./runbook.sh                     first pass, resume in a fresh process, audit; evidence under runs/
#   ./runbook.sh test [CASE...]      replay the transcripts; last line: N passed, N failed
#   ./runbook.sh record [CASE...]    fill the transcripts in from a run; review with git diff expected/
#   ./runbook.sh group N COMMAND...  N processes of COMMAND on this machine's CPU, as a launcher starts them
#
# .venv is made from expected/requirements.txt when it is needed; PYTHON=/path/to/python uses an environment
# of your own. DEVICES (default 4) is the number of devices of a group, all its processes together.
# Exit status: 0 passed, 1 a check failed, 2 cannot run as asked.

set -u
export LC_ALL=C
unset CDPATH BASH_ENV ENV

CASE_LIMIT=240 # seconds one transcript may take
GROUP_GRACE=70 # seconds the others of a group still have once one has failed; the drill says after 60 who did not start
STOP_GRACE=1   # seconds between SIGTERM and SIGKILL

ACTION=${1-}
ROOT=$(cd -- "$(dirname -- "$0")" && pwd -P) || exit 2
EXPECTED=$ROOT/expected
BENCH=      # scratch folder of this run: bin/ (python, group), tmp/, cases/
running=()  # process groups that were started and not yet stopped
passed=0 failed=0 skipped=0

refuse() {
  printf 'runbook: %s\n' "$*" >&2
  exit 2
}

# ---- Processes: nothing that was started outlives the run ----

# Starts a command in a process group of its own, so that it can be ended with all that it starts in turn.
# Without disown bash would announce its death, with a process number that differs in every run.
spawn() {
  set -m
  "$@" &
  set +m
  disown "$!"
}

# Ends a process group. SIGTERM comes first, so that a `group` in it can take its own processes along.
stop() {
  kill -TERM -- "-$1" && sleep "$STOP_GRACE" && kill -KILL -- "-$1"
} 2>/dev/null

leave() {
  local pid
  for pid in ${running[@]+"${running[@]}"}; do stop "$pid"; done
  if [ "$failed" = 0 ] && [ -n "$BENCH" ]; then rm -rf "$BENCH"; fi
}
trap leave EXIT
trap 'exit 130' HUP INT TERM

# ---- The environment: one Python, reached as `python` ----

# Prints the full path of a Python that is new enough.
python_at() {
  "$1" -I -c 'import sys; print(sys.executable) if sys.version_info >= (3, 11) else sys.exit(1)' 2>/dev/null
}

# Compiled byte code (uv leaves that out) spares the first run of each process a few seconds.
install() {
  if uv --version >/dev/null 2>&1; then
    "$1" -m venv --without-pip "$2" &&
      uv pip install -q --compile-bytecode --python "$2/bin/python" --require-hashes -r "$3"
  else
    "$1" -m venv "$2" && "$2/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes -r "$3"
  fi
}

# Makes .venv unless it holds the locked packages. Its copy of the lock is filled in last: where that differs, the
# folder is half-made or out of date; where there is none, the folder is somebody else's.
make_venv() {
  local venv=$ROOT/.venv lock=$EXPECTED/requirements.txt name base=
  if cmp -s "$lock" "$venv/runbook.lock" && python_at "$venv/bin/python" >/dev/null; then return; fi
  if [ -e "$venv" ] && [ ! -e "$venv/runbook.lock" ]; then
    refuse "$venv was not made by this runbook: move it away, or use it with PYTHON=$venv/bin/python"
  fi
  for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if base=$(python_at "$name"); then break; fi
  done
  [ -n "$base" ] || refuse "no Python 3.11 or newer on PATH: install one, or name one with PYTHON=/path/to/python"
  printf 'Making .venv with %s (once; about 700 MB)\n' "$base" >&2
  if ! { rm -rf "$venv" && mkdir "$venv" && : >"$venv/runbook.lock" &&
    install "$base" "$venv" "$lock" && cp "$lock" "$venv/runbook.lock"; }; then
    refuse "$venv could not be made: the lines above say why"
  fi
}

# Sets PYTHON, and puts `python` and `group` first on PATH, whatever the interpreter's own name is.
environment() {
  local named=${PYTHON:-$ROOT/.venv/bin/python}
  if [ -z "${PYTHON:-}" ]; then make_venv; fi
  PYTHON=$(python_at "$named") || refuse "PYTHON=$named is not a Python 3.11 or newer"
  BENCH=$(mktemp -d "${TMPDIR:-/tmp}/runbook.XXXXXX") || refuse "no scratch folder can be made in ${TMPDIR:-/tmp}"
  BENCH=$(cd "$BENCH" && pwd -P)
  mkdir "$BENCH/bin" "$BENCH/tmp" "$BENCH/cases"
  printf '#!/usr/bin/env bash\nexec %q "$@"\n' "$PYTHON" >"$BENCH/bin/python"
  printf '#!/usr/bin/env bash\nexec %q %q group "$@"\n' "$BASH" "$ROOT/${0##*/}" >"$BENCH/bin/group"
  chmod +x "$BENCH/bin/python" "$BENCH/bin/group"
  PATH=$BENCH/bin:$PATH
}

# ---- Transcripts: a terminal session each ----

# Runs a transcript in the scratch folder $2. Whatever in the caller's environment would bend it stays outside.
session() {
  local python=$PYTHON
  # shellcheck disable=SC2086 # lists of names
  unset ${!COURSE_@} ${!JAX@} ${!XLA_@} ${!TPU_@} ${!SLURM_@} ${!OMPI_@} ${!PMI@} ${!KUBERNETES_@} ${!PYTHON@}
  unset DEVICES COLUMNS FORCE_COLOR
  export PYTHON=$python TMPDIR=$BENCH/tmp EXPECTED WORK=$2
  cd "$WORK" && exec python -I "$EXPECTED/transcript.py" "$1" "$BASH" "$CASE_LIMIT" "$ACTION"
}

# Starts a case as running[$2].
start() {
  local name=$1 work=$RUN/$1 program
  mkdir "$work" "$work.log" || refuse "no scratch folder for $name"
  for program in distributed_04.py recovery_audit.py runbook.sh; do
    if [ -f "$ROOT/$program" ]; then cp "$ROOT/$program" "$work/"; fi
  done
  spawn session "$EXPECTED/$name.txt" "$work" >"$work.log/remark" 2>&1
  running[$2]=$!
}

judge() {
  local name=$1 work=$RUN/$1 want=$EXPECTED/$1.txt remark
  remark=$(cat "$work.log/remark")
  if diff -u -L "expected/$name.txt" -L "this run" "$want" "$work.log/got" >"$work.log/diff" 2>/dev/null; then
    passed=$((passed + 1))
    printf 'ok    %s (%d s)\n' "$name" "$2"
  elif [ "$remark" != "${remark#needs }" ]; then
    skipped=$((skipped + 1))
    printf 'skip  %s: %s\n' "$name" "$remark"
  else
    failed=$((failed + 1))
    printf 'FAIL  %s: %s\n' "$name" "${remark:-differs}"
    cat "$work.log/diff"
    tail -n 20 "$work.log/stderr" 2>/dev/null | sed 's/^/stderr: /'
    printf 'scratch folder: %s\n' "$work"
    return
  fi
  if [ -n "$ACTION" ]; then chmod -R u+rwx "$work" && rm -rf "$work"; fi
}

# Replays cases two at a time.
replay() {
  local slot busy
  local -a name since
  while
    busy=
    for slot in 0 1; do
      if [ -n "${running[slot]-}" ]; then
        if kill -0 "${running[slot]}" 2>/dev/null; then busy=1 && continue; fi
        stop "${running[slot]}"
        running[slot]=
        judge "${name[slot]}" $((SECONDS - since[slot]))
      fi
      if [ $# -gt 0 ]; then
        busy=1 name[slot]=$1 since[slot]=$SECONDS
        start "$1" "$slot"
        shift
      fi
    done
    [ -n "$busy" ]
  do sleep 0.1; done
  printf '%d passed, %d failed' "$passed" "$failed"
  if [ "$skipped" -gt 0 ]; then printf ', %d skipped' "$skipped"; fi
  echo
  [ "$passed" -gt 0 ] && [ "$failed" = 0 ]
}

# Replays the named cases, or all.
replay_named() {
  local name seen=/requirements/
  [ $# -gt 0 ] || set -- "$EXPECTED"/*.txt
  for name; do
    shift
    name=${name##*/} name=${name%.txt}
    case $seen in */"$name"/*) continue ;; esac
    seen=$seen$name/
    [ -f "$EXPECTED/$name.txt" ] || refuse "there is no expected/$name.txt"
    set -- "$@" "$name"
  done
  environment
  RUN=$BENCH/cases
  replay "$@"
}

main_job() {
  local status
  environment
  RUN=$ROOT/runs/$(date +%Y%m%d-%H%M%S)
  mkdir -p "$RUN" || refuse "the evidence cannot be kept there"
  replay first-pass resume audit-solution
  status=$?
  printf 'Evidence and checkpoints: %s\n' "$RUN"
  [ "$status" = 0 ] && echo "Every diff with expected/ is empty."
}

# ---- A group of processes ----

# One process. Slurm's variables are all that jax.distributed.initialize() needs; there is no launcher.
member() {
  export SLURM_PROCID=$1 SLURM_LOCALID=$1 SLURM_NTASKS=$2 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=localhost
  export SLURM_STEP_NUM_NODES=1 JAX_COORDINATOR_PORT=$3 JAX_NUM_CPU_DEVICES=$4 JAX_PLATFORMS=cpu COURSE_MULTIPROCESS=1
  shift 4
  env "$@"
  echo $? >"$BENCH/$SLURM_PROCID.exit"
}

# A process that was killed together with its shell has left no status.
member_status() {
  cat "$BENCH/$1.exit" 2>/dev/null || echo 137
}

# Prints a process's report, which is its prefixed lines. The rest (Gloo's connections, logs) is noise, unless it
# failed without a line of its own, or with a traceback.
report() {
  local rank=$1 status=$2 out=$BENCH/$1.out err=$BENCH/$1.err prefix='^\[[0-9]*/[0-9]*\] '
  grep "$prefix" "$out"
  grep "$prefix" "$err" >&2
  if grep -q Traceback "$out" "$err" ||
    { [ "$status" -ge 1 ] && [ "$status" -le 128 ] && ! grep -q "$prefix" "$out" "$err"; }; then
    cat "$out" "$err" | sed "s/^/group: process $rank: /" >&2
  fi
  if [ "$status" -gt 128 ]; then printf 'group: process %d ended with status %d (a signal)\n' "$rank" "$status" >&2; fi
}

group() {
  local count=${1-} devices=${DEVICES:-4} rank port left deadline="" status highest=0
  case $count in [1-9] | [1-9][0-9]) ;; *) refuse "group N COMMAND...: N is a number from 1 to 99, not '$count'" ;; esac
  case $devices in [1-9] | [1-9][0-9] | [1-9][0-9][0-9]) ;; *) refuse "DEVICES is a number, not '$devices'" ;; esac
  [ $((devices % count)) = 0 ] || refuse "DEVICES=$devices cannot be shared out evenly among $count processes"
  [ $# -gt 1 ] || refuse "group $count COMMAND...: there is no command"
  shift
  environment
  port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])') ||
    refuse "no free port on localhost"
  STOP_GRACE=0 # JAX may swallow SIGTERM, and whoever ends this process does not wait long
  for ((rank = 0; rank < count; rank++)); do
    spawn member "$rank" "$count" "$port" $((devices / count)) "$@" </dev/null >"$BENCH/$rank.out" 2>"$BENCH/$rank.err"
    running[rank]=$!
  done
  while
    left=
    for ((rank = 0; rank < count; rank++)); do
      if kill -0 "${running[rank]}" 2>/dev/null; then
        left="$left $rank"
      elif [ -z "$deadline" ] && [ "$(member_status "$rank")" != 0 ]; then
        deadline=$((SECONDS + GROUP_GRACE))
      fi
    done
    [ -n "$left" ]
  do
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
      for rank in $left; do
        printf 'group: killed process %d, still running %d s after another had failed\n' "$rank" "$GROUP_GRACE" >&2
        kill -KILL -- "-${running[rank]}"
      done
      deadline=
    fi
    sleep 0.2
  done
  for ((rank = 0; rank < count; rank++)); do
    status=$(member_status "$rank")
    report "$rank" "$status"
    if [ "$status" -gt "$highest" ]; then highest=$status; fi
  done
  return "$highest"
}

case $#:$ACTION in
  0:) main_job ;;
  *:test | *:record) shift && replay_named "$@" ;;
  *:group) shift && group "$@" ;;
  *:help | *:--help | *:-h) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
  *) refuse "unknown command '$ACTION'; ./runbook.sh help lists them" ;;
esac
