# What the tests of the whole program share. Sourced with PROGRAM as first argument; works in a folder of its own that
# goes away again. A test calls `finish` last.
# shellcheck shell=bash
set -uo pipefail
program=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failed=0
# Else Open MPI gives every rank of a job that was aborted a second to end by itself.
export OMPI_MCA_odls_base_sigkill_timeout=0

# fail TEXT [FILE]: says it, with the file's last lines, and goes on.
fail() {
  printf 'FAILED (line %s): %s\n' "${BASH_LINENO[*]}" "$1"
  [ $# -lt 2 ] || tail -n 12 "$2" | sed 's/^/    /'
  failed=1
}
finish() {
  [ "$failed" -eq 0 ] && echo "all right"
  exit "$failed"
}

# expect CODE TEXT COMMAND...: the exit code, and that stdout and stderr together contain TEXT. Leaves them in `out`.
expect() {
  local code=$1 text=$2
  shift 2
  "$@" >out 2>&1
  local got=$?
  if [ "$got" -ne "$code" ] || ! grep -qF -- "$text" out; then
    printf 'FAILED: %s\n  wanted exit code %s and: %s\n  got exit code %s and:\n' "$*" "$code" "$text" "$got"
    sed 's/^/    /' out
    failed=1
  fi
}
# said TEXT...: what the last `expect` printed contains these too.
said() {
  local text missing=
  for text in "$@"; do grep -qF -- "$text" out || missing+=" «$text»"; done
  [ -z "$missing" ] || fail "not said:$missing" out
}
# said_once: the last `expect` printed one error, and that on stderr by one rank.
said_once() {
  [ "$(grep -c 'annulus: error' out)" -eq 1 ] || fail "the error was not said exactly once" out
}

# ranks N COMMAND...; nothing here may hang.
ranks() { timeout -k 5 60 mpirun -np "$1" --oversubscribe --bind-to none "${@:2}"; }
# train N RUN [--set …]: a run of the tiny model on N ranks in folder RUN.
train() { ranks "$1" "$program" train tiny.toml --set "checkpoint.dir=$2" "${@:3}"; }

# tiny_run: data and a config, of a second. Short documents are packed, the long one crosses every chunk of a sequence.
tiny_run() {
  mkdir -p data
  local i
  for ((i = 0; i < 24; i++)); do
    printf '{"text": "%s: a short document of %s words\\nand one more line."}\n' "$i" "$((i * i))"
    ((i % 5)) || printf '{"text": "%0*d"}\n' "$((i + 3))" "$i"
  done >data/short.jsonl
  seq -s ' ' 1000 1400 >data/long.txt
  seq -s ', ' 300 470 >held_out.txt
  cat >tiny.toml <<'END'
[model]
vocab_size = 257
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[data]
sources = ["data"]
[train]
steps = 20
global_batch = 2
sequence_length = 96
[optimizer]
lr = 3e-3
[schedule]
warmup_steps = 5
[checkpoint]
every = 10
[log]
peak_tflops = 1
END
}

# steps_of RUN: "step loss grad_norm" of every step record, as written.
steps_of() {
  awk -F'[:,]' '/"kind":"step"/ { print $4, $6, $8 }' "$1/metrics.jsonl"
}
# have_steps FROM TO RUN: every step exactly once, in order.
have_steps() {
  diff <(seq "$1" "$2") <(steps_of "$3" | cut -d' ' -f1) >differ || fail "$3/metrics.jsonl lacks or repeats steps" differ
}
# same_losses TOLERANCE RUN RUN [FROM]: relative, of every step from FROM on; as many steps in both.
same_losses() {
  join <(steps_of "$2" | sort) <(steps_of "$3" | sort) | awk -v tolerance="$1" -v from="${4:-1}" '
    $1 < from { next }
    { error = ($2 - $4) / $4; if (error < 0) error = -error; if (error > worst) worst = error; n++
      if (!(error <= tolerance)) bad = bad " " $1 }
    END { printf "%d steps, largest difference %g\n", n, worst; if (n == 0 || bad) { print "differ at" bad; exit 1 } }
  ' >differ || fail "$2 and $3 differ by more than $1" differ
  [ "$(steps_of "$2" | wc -l)" -eq "$(steps_of "$3" | wc -l)" ] || fail "$2 and $3 have not the same steps" differ
  echo "$2, $3: $(head -n 1 differ)"
}
# newest RUN: the name of its newest committed checkpoint.
newest() { find "$1" -maxdepth 1 -name 'step-????????' -printf '%f\n' | sort | tail -n 1; }
# weights_of CHECKPOINT: group, tensor and hash of every piece.
weights_of() {
  awk '/"xxh3_128"/' "$1/manifest.json" | sed 's/},*$/}/'
}

# wait_for_step N RUN: until that many steps are done. Gives up after a minute.
wait_for_step() {
  local i
  for ((i = 0; i < 600; i++)); do
    if [ -f "$2/metrics.jsonl" ] && [ "$(steps_of "$2" | tail -n 1 | cut -d' ' -f1)" -ge "$1" ] 2>/dev/null; then
      return 0
    fi
    sleep 0.1
  done
  fail "$2 did not come to step $1" out
  return 1
}
