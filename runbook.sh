#!/usr/bin/env bash
# Runs the drill and the audit, and compares what they print with the transcripts in expected/.
#
#   ./runbook.sh                     first pass, resume in a fresh process, audit; evidence under runs/
#   ./runbook.sh test [CASE...]      replay the transcripts; last line: N passed, N failed
#   ./runbook.sh record [CASE...]    fill the transcripts in from a run; review with git diff expected/
#   ./runbook.sh group N COMMAND...  N processes of COMMAND on this machine's CPU, as a launcher starts them
#   ./runbook.sh tpu                 print the commands that drill the Cloud TPU slice $TPU_NAME in $ZONE
#   ./runbook.sh tpu run             run them, and verify every worker's report
#
# .venv is made from expected/requirements.txt when it is needed; PYTHON=/path/to/python uses an environment
# of your own. DEVICES (default 4) is the number of devices of a group, all its processes together.
# Exit status: 0 passed, 1 a check failed, 2 cannot run as asked.

set -u
export LC_ALL=C
unset CDPATH BASH_ENV ENV

CASE_LIMIT=240 # seconds one transcript may take
GROUP_GRACE=70 # seconds the others of a group still have once one has failed; the drill says after 60 who did not start
PREPARE_LIMIT=900 # seconds the packages of a TPU worker may take
PASS_LIMIT=300    # seconds a pass may take there
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

# ---- A Cloud TPU slice: commands to paste, or run and verified here ----

# A variable as it stands between double quotes: its value, edited by $2 first, or itself where it has none.
shown() {
  if [ -z "${!1-}" ]; then printf '$%s' "$1" && return; fi
  printf '%s\n' "${!1}" | sed -e "${2-}" -e 's/[\\"$`]/\\&/g' -e "s/!/\"'!'\"/g"
}
quoted() { printf '%s\n' "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/"; }
locked() { sed -n "s/^$1\(==[^ ]*\).*/\1/p" "$EXPECTED/requirements.txt" | tail -n 1; } # the newest Python's is last

tpu_prepare() {
  cat <<EOF
mkdir -p ~/jax-tpu-lab && cd ~/jax-tpu-lab &&
  python3 -m pip install -q --user uv && python3 -m uv venv -q --allow-existing --python 3.12 .venv &&
  python3 -m uv pip install -q --python .venv/bin/python "jax[tpu]$(locked jax)" \\
  orbax-checkpoint$(locked orbax-checkpoint) numpy$(locked numpy) gcsfs==2026.10.1
EOF
}

# A pass in the folder $1, which is quoted.
tpu_pass() {
  cat <<EOF
cd ~/jax-tpu-lab &&
  COURSE_MULTIPROCESS=1 JAX_PLATFORMS=${TPU_BACKEND:-tpu} COURSE_CHECKPOINT_DIR=$1 \\
  ${2-}.venv/bin/python distributed_04.py
EOF
}

tpu_commands() {
  local slice where folder
  slice=$(shown TPU_NAME) folder=\'$(shown COURSE_CHECKPOINT_DIR "s/'/'\\\\''/g")\'
  where="--zone=\"$(shown ZONE)\"${PROJECT:+ --project=\"$(shown PROJECT)\"} --worker=all"
  cat <<EOF
gcloud compute tpus tpu-vm ssh "$slice" $where --command='$(tpu_prepare)'
gcloud compute tpus tpu-vm scp distributed_04.py "$slice":jax-tpu-lab/ $where
gcloud compute tpus tpu-vm ssh "$slice" $where --command="$(tpu_pass "$folder")"
gcloud compute tpus tpu-vm ssh "$slice" $where --command="$(tpu_pass "$folder" "COURSE_RESUME=1 ")"
EOF
}

fail() { (refuse "$@") || exit 1; }
tpu_vm() { gcloud compute tpus tpu-vm "$@" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"} </dev/null; }

# Runs $3 on every worker, and stops if one fails. Its output stays there first, as --worker=all mixes the streams.
# gcloud repeats a command whose ssh broke, though it may still run: only the one that makes the folder runs it, or a
# second first pass would be refused for the checkpoint of the first.
step() {
  local name=$1 limit=$2 worker file said culprit="" why=""
  printf '%s\n' "$name"
  tpu_vm ssh "$TPU_NAME" --worker=all --command="mkdir -p ~/jax-tpu-lab/$ID && cd ~/jax-tpu-lab/$ID || exit 1
if mkdir $name; then timeout -k 5 $limit bash -c $(quoted "$3") >$name/report 2>&1; echo \$? >$name/status
else echo '$name: ssh was repeated, the report of the first attempt stands'; fi
for ((n = 0; n < $limit + 10; n++)); do [ ! -s $name/status ] || exit \$(cat $name/status); sleep 1; done
exit 1" >"$RUN/$name.log" 2>&1
  case $?:$name in 0:check | 0:prepare | 0:copy) return ;; esac
  grep "^$name: ssh was repeated" "$RUN/$name.log"
  for ((worker = 0; worker < WORKERS; worker++)); do
    file=$RUN/$name.$worker
    tpu_vm ssh "$TPU_NAME" --worker="$worker" >"$file" 2>>"$RUN/$name.log" \
      --command="cd ~/jax-tpu-lab/$ID/$name && cat report && echo status \$(cat status)"
    case $(tail -n 1 "$file") in
      "status 0") continue ;;
      "status 124" | "status 137") said="killed after $limit s" ;;
      "status "*) said=$({ grep 'FAIL: ' "$file" || grep '^\[[0-9]*/' "$file" || sed '$d' "$file"; } | tail -n 1) ;;
      *) said="no report, or its end is missing" ;;
    esac
    # The culprit is not one that only waited for another.
    case $culprit:$why in :* | *": waited "[0-9]*) culprit=$worker why=$said ;; esac
  done
  [ -z "$culprit" ] || fail "worker $culprit: $name: $why (see $RUN/$name.*)"
}

# Compares all reports, in the order of processes, with what as many CPU devices print here: this is a transcript, too.
verify() {
  local pass rank devices
  mkdir "$RUN/verify" "$RUN/verify.log"
  for pass in first-pass resume; do
    cat "$RUN/$pass".[0-9]* | grep '^\[[0-9]*/[0-9]*\] ' | sort -s -t / -k 1.2,1n >"$RUN/verify/$pass"
  done
  devices=$(sed -n 's/^.* Recorded backend.* \([0-9]*\)$/\1/p' "$RUN/verify/first-pass" | sed q)
  sed "s/^DEVICES = .*/DEVICES = $devices/" distributed_04.py >"$RUN/cpu.py"
  COURSE_MULTIPROCESS='' COURSE_RESUME='' COURSE_EVIDENCE_DIR='' COURSE_CHECKPOINT_DIR=$RUN/checkpoint \
    "$PYTHON" "$RUN/cpu.py" >"$RUN/cpu" 2>&1 || fail "the run of '$devices' CPU devices here failed (see $RUN/cpu)"
  {
    echo "# decimals: rtol 2e-5 atol 2e-6"
    for pass in first-pass resume; do
      echo "\$ sed '/ Checkpoint: /d' $pass; echo \"\$(sed 's/^[^ ]* //' $pass | sort -u | grep -c .) different lines\""
      for ((rank = 0; rank < WORKERS; rank++)); do
        sed "/^Checkpoint:/d; s/^\(Recorded .*: \).*/\1${TPU_BACKEND:-tpu} $WORKERS $devices/; s/^PASS: .*/&$ALONE/
          s|^|[$rank/$WORKERS] |" "$RUN/cpu"
      done
      echo "$(grep -c . "$RUN/cpu") different lines" && echo '[exit 0]'
    done
  } >"$RUN/wanted"
  (session "$RUN/wanted" "$RUN/verify")
  diff "$RUN/wanted" "$RUN/verify.log/got" >"$RUN/diff" || fail "wanted '$(sed -n 's/^< //p' "$RUN/diff" | sed q)'," \
    "got '$(sed -n 's/^> //p' "$RUN/diff" | sed q)' (see $RUN/diff)"
}

tpu_run() {
  local name state
  command -v gcloud >/dev/null || refuse "gcloud is not on PATH: install the Google Cloud CLI"
  for name in TPU_NAME ZONE COURSE_CHECKPOINT_DIR; do [ -n "${!name:-}" ] || refuse "$name is unset or empty"; done
  [[ $COURSE_CHECKPOINT_DIR = gs://* || ${TPU_SHARED:-} = 1 ]] ||
    refuse "COURSE_CHECKPOINT_DIR=$COURSE_CHECKPOINT_DIR is not on gs://: TPU_SHARED=1 says that all workers share it"
  environment
  ID=$(date +%Y%m%d-%H%M%S)-tpu-$$ RUN=$ROOT/runs/$ID ALONE=
  { mkdir -p "$RUN" && cd "$ROOT"; } || refuse "the reports cannot be kept in $RUN"
  tpu_vm describe "$TPU_NAME" --format='value(state,networkEndpoints.len())' >"$RUN/slice" 2>"$RUN/slice.log" ||
    refuse "TPU_NAME=$TPU_NAME: $(tail -n 1 "$RUN/slice.log")"
  read -r state WORKERS <"$RUN/slice"
  [ "$state" = READY ] || refuse "TPU_NAME=$TPU_NAME is $state, not READY"
  [ "$WORKERS" -gt 1 ] || ALONE=" (one process: not multi-controller evidence)"
  [ -n "$ALONE" ] || ssh-add -T ~/.ssh/google_compute_engine.pub >/dev/null 2>&1 ||
    refuse "gcloud copies to several workers with a key from the ssh agent: ssh-add ~/.ssh/google_compute_engine"
  # shellcheck disable=SC2016 # for the worker
  step check 60 'sudo=$(sudo -n true 2>/dev/null && echo sudo -n)
held=$($sudo find /proc/[0-9]*/fd -lname "/dev/accel*" -o -lname "/dev/vfio/[0-9]*" 2>/dev/null | cut -d / -f 3)
[ -z "$held" ] || { echo the chips are held by process $held; exit 1; }'
  step prepare "$PREPARE_LIMIT" "$(tpu_prepare)"
  tpu_vm scp distributed_04.py "$TPU_NAME":jax-tpu-lab/ --worker=all >"$RUN/scp.log" 2>&1
  step copy 60 "cksum <~/jax-tpu-lab/distributed_04.py | grep -x '$(cksum <distributed_04.py)' ||
{ echo distributed_04.py did not arrive; exit 1; }"
  step first-pass "$PASS_LIMIT" "$(tpu_pass "$(quoted "$COURSE_CHECKPOINT_DIR")")"
  step resume "$PASS_LIMIT" "$(tpu_pass "$(quoted "$COURSE_CHECKPOINT_DIR")" "COURSE_RESUME=1 ")"
  verify
  printf 'worker  processes  devices  first pass  resume\n'
  cat "$RUN"/verify/{first-pass,resume} | awk '$2 == "Recorded" { size[$1] = sprintf("%-11s%-9s", $(NF - 1), $NF) }
    $2 == "PASS:" && passed[$1]++ { printf "%-8s%s%-12s%s\n", substr($1, 2) + 0, size[$1], "PASS", "PASS" }'
  printf 'Reports: %s\nPASS: every worker; ids as the CPU run here, losses within the tolerance%s\n' "$RUN" "$ALONE"
}

case $#:$ACTION in
  0:) main_job ;;
  *:test | *:record) shift && replay_named "$@" ;;
  *:group) shift && group "$@" ;;
  1:tpu) tpu_commands ;;
  2:tpu) [ "$2" = run ] || refuse "tpu or tpu run, not tpu '$2'" && tpu_run ;;
  *:help | *:--help | *:-h) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
  *) refuse "unknown command '$ACTION'; ./runbook.sh help lists them" ;;
esac
