#!/usr/bin/env bash
# Requests to stop, ranks that die or hang, and runs that diverge: exit codes, what is saved, and that nothing hangs.
#   signals_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run
endless=(--set train.steps=1000000 --set schedule.type=constant --set checkpoint.every=0)

# start N RUN [--set …]: in the background; $! is mpirun's, each rank leaves its own in pid.RANK.
cat >rank.sh <<'END'
echo $$ >"pid.$OMPI_COMM_WORLD_RANK"
exec "$@"
END
start() {
  rm -f pid.*
  mpirun -np "$1" --oversubscribe --bind-to none --timeout 60 bash rank.sh "$program" train tiny.toml \
    --set "checkpoint.dir=$2" "${endless[@]}" "${@:3}" >out 2>&1 &
  job=$!
  wait_for_step 3 "$2"
}
# ended CODE: how the job ended, within 20 seconds.
ended() {
  local begin=$SECONDS code
  wait "$job"
  code=$?
  [ "$code" -eq "$1" ] || fail "wanted exit code $1, got $code" out
  [ $((SECONDS - begin)) -le 20 ] || fail "it took $((SECONDS - begin)) s to end" out
}
# gone PID: within 10 seconds.
gone() {
  local i
  for ((i = 0; i < 100; i++)); do
    kill -0 "$1" 2>/dev/null || return 0
    sleep 0.1
  done
  return 1
}
# goes_on RUN: from the checkpoint at which it stopped, for five steps more, to the end.
goes_on() {
  local step=$((10#$(newest "$1" | cut -d- -f2)))
  said "stopped by a signal after step $step; start again to go on" "saved $1/$(newest "$1")"
  expect 0 "going on from $1/$(newest "$1") (step $step)" train 2 "$1" --set "train.steps=$((step + 5))"
  have_steps 1 $((step + 5)) "$1"
}

# SIGUSR1 to mpirun, which forwards it; SIGTERM to the ranks themselves, all or one; without mpirun.
start 2 usr1
kill -USR1 "$job"
ended 75
goes_on usr1
start 2 term
kill -TERM "$(cat pid.0)" "$(cat pid.1)"
ended 75
goes_on term
start 2 term_one
kill -TERM "$(cat pid.1)"
ended 75
goes_on term_one
"$program" train tiny.toml --set checkpoint.dir=alone "${endless[@]}" >out 2>&1 &
job=$!
wait_for_step 3 alone
kill -USR1 "$job"
ended 75
goes_on alone

# A rank that hangs: the others say so after the watchdog's time and end the job, the stopped process too.
for rank in 0 1; do
  start 2 "stop-$rank" --set train.watchdog_seconds=3
  begin=$SECONDS
  kill -STOP "$(cat "pid.$rank")"
  ended 6
  said "watchdog: rank $rank has not moved for" '(its process is stopped)' 'ending the job with exit code 6'
  [ "$(grep -c 'has not moved for' out)" -eq 1 ] || fail "said more than once" out
  [ $((SECONDS - begin)) -ge 2 ] || fail "the watchdog was too early" out
  gone "$(cat "pid.$rank")" || fail "the stopped rank is still there"
done

# A rank that dies ends the job; starting again goes on from the last checkpoint.
for rank in 0 1; do
  start 2 "kill-$rank" --set checkpoint.every=5
  wait_for_step 12 "kill-$rank"
  kill -KILL "$(cat "pid.$rank")"
  ended 137
  step=$((10#$(newest "kill-$rank" | cut -d- -f2)))
  [ "$step" -ge 5 ] || fail "no checkpoint after 12 steps, one due every 5" out
  expect 0 "(step $step)" train 2 "kill-$rank" --set "train.steps=$((step + 5))"
  have_steps 1 $((step + 5)) "kill-$rank"
done

explode=(--set optimizer.lr=1e30 --set optimizer.grad_clip=0 --set optimizer.weight_decay=0)
# Divergence: the step is refused, and the checkpoint before it is whole and untouched.
expect 5 'There is no checkpoint yet' train 2 diverged "${explode[@]}"
said 'is not finite; the step was refused'
said_once
expect 0 'saved' train 2 diverging --set train.steps=10
expect 5 'diverging/step-00000010 is whole: start again from it' train 2 diverging --set train.steps=30 \
  "${explode[@]}" --set checkpoint.every=0
said 'is not finite; the step was refused'
said_once
[ "$(newest diverging)" = step-00000010 ] || fail "a step that was refused is saved as $(newest diverging)" out
refused=$(sed -n 's/.*error: step \([0-9]*\): .*/\1/p' out)
[ "$(steps_of diverging | tail -n 1 | cut -d' ' -f1)" -eq $((refused - 1)) ] || fail "metrics hold a refused step" out
grep -q 'nan\|inf\|null' diverging/metrics.jsonl && fail "metrics hold a loss that is no number" diverging/metrics.jsonl
expect 0 'going on from diverging/step-00000010' train 2 diverging
have_steps 1 20 diverging
finish
