#!/usr/bin/env bash
# The same losses for any split of the ranks: 200 steps in fp64 with packed documents.   equal_runs_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run

for run in 1:one:1 4:ring:1 4:mesh:2; do
  IFS=: read -r n name data <<<"$run"
  expect 0 'saved' train "$n" "$name" --set train.precision=fp64 --set train.steps=200 --set "parallel.data=$data" \
    --set checkpoint.every=0
  said "$n ranks: data $data x sequence $((n / data))"
  have_steps 1 200 "$name"
done
same_losses 1e-8 one ring
same_losses 1e-8 one mesh
# It learnt something: equal losses of a run that stands still would show nothing.
steps_of one | awk 'NR == 1 { first = $2 } { last = $2 } END { exit !(last < 0.7 * first) }' || fail "no training" out
finish
