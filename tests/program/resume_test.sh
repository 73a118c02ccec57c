#!/usr/bin/env bash
# A run that stopped and went on is the run that never stopped.   resume_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run

# positions_of CHECKPOINT: samples taken of every source.
positions_of() { "$program" inspect "$1" --json | sed 's/.*"position":\[\([0-9,]*\)\].*/\1/'; }

for n in 1 2; do
  expect 0 'saved' train "$n" "straight-$n"
  have_steps 1 20 "straight-$n"
  # As if it had been killed after step 10: its folder without what came later but for the metrics.
  mkdir "again-$n"
  cp -r "straight-$n/step-00000010" "straight-$n/metrics.jsonl" "again-$n"
  [ "$(positions_of "again-$n")" = 20 ] || fail "10 steps of 2 sequences are not at position 20"
done

# The same ranks: the same bits.
for n in 1 2; do
  expect 0 "going on from again-$n/step-00000010 (step 10)" train "$n" "again-$n"
  have_steps 1 20 "again-$n"
  diff <(steps_of "straight-$n") <(steps_of "again-$n") >differ || fail "losses and norms on $n ranks differ" differ
  diff <(weights_of "straight-$n/step-00000020") <(weights_of "again-$n/step-00000020") >differ ||
    fail "weights and optimiser state on $n ranks differ" differ
  [ "$(weights_of "again-$n/step-00000020" | wc -l)" -gt 20 ] || fail "no hashes to compare"
  expect 0 'all compared, all right' "$program" inspect --verify "straight-$n/step-00000020"
  expect 0 'all compared, all right' "$program" inspect --verify "again-$n/step-00000020"
  [ "$(positions_of "again-$n")" = 40 ] || fail "20 steps of 2 sequences are not at position 40"
done

# Other numbers of ranks: the same within rounding, and the same samples, since a loss is of its samples.
for split in 2:1:1 2:3:1 2:4:2 1:2:2 1:4:1; do
  IFS=: read -r from n data <<<"$split"
  run="from-$from-on-$n-$data"
  mkdir "$run"
  cp -r "straight-$from/step-00000010" "straight-$from/metrics.jsonl" "$run"
  expect 0 "going on from $run/step-00000010 (step 10)" train "$n" "$run" --set "parallel.data=$data"
  have_steps 1 20 "$run"
  same_losses 1e-5 "$run" "straight-$from" 11
  [ "$(positions_of "$run")" = 40 ] || fail "$run is not at position 40"
done

# Stopping in the middle of nothing: two sources, a step that is no multiple of checkpoint.every.
two=(--set 'data.sources=[{path = "data/short.jsonl", weight = 3}, {path = "data/long.txt"}]')
expect 0 'saved' train 2 whole "${two[@]}" --set checkpoint.every=7
mkdir parts
cp -r whole/step-00000014 parts
expect 0 'going on from parts/step-00000014 (step 14)' train 2 parts "${two[@]}" --set checkpoint.every=7
have_steps 15 20 parts
diff <(steps_of whole | tail -n 6) <(steps_of parts) >differ || fail "two sources: losses differ" differ
[ "$(positions_of parts)" = 30,10 ] || fail "40 samples of weights 3 and 1 are not 30 and 10"

# Sparse layers: the same bits on the same ranks, the same losses on others; a model that is not the checkpoint's is said.
nsa=(--set 'model.attention=["dense", "nsa"]' --set model.nsa.block=8 --set model.nsa.stride=4 --set model.nsa.select_block=8
  --set model.nsa.select_count=4 --set model.nsa.window=9)
expect 0 'saved' train 2 sparse "${nsa[@]}"
mkdir sparse-2 sparse-3 sparse-other
for run in sparse-2 sparse-3 sparse-other; do cp -r sparse/step-00000010 sparse/metrics.jsonl "$run"; done
expect 0 'going on from sparse-2/step-00000010' train 2 sparse-2 "${nsa[@]}"
diff <(steps_of sparse) <(steps_of sparse-2) >differ || fail "sparse losses differ" differ
diff <(weights_of sparse/step-00000020) <(weights_of sparse-2/step-00000020) >differ || fail "sparse weights differ" differ
expect 0 'going on from sparse-3/step-00000010' train 3 sparse-3 "${nsa[@]}"
same_losses 1e-4 sparse-3 sparse 11
expect 0 'model.nsa.window was 9 and is 5' train 2 sparse-other "${nsa[@]}" --set model.nsa.window=5
expect 4 'model.nsa.block was 8 and is 4' train 2 sparse-other "${nsa[@]}" --set model.nsa.block=4

# What would repeat or skip samples is refused; a run that is done says so.
expect 2 'train.seed was 0 and is 5' train 2 parts "${two[@]}" --set train.seed=5
expect 2 "the run's data has changed since this checkpoint" train 2 parts
expect 2 "the run's data has changed since this checkpoint" train 2 parts "${two[@]}" --set train.sequence_length=48
expect 0 'nothing to do: step 20 of train.steps = 20' train 2 parts "${two[@]}"
expect 2 'checkpoint.resume = "none", but parts holds checkpoints' train 2 parts "${two[@]}" --set checkpoint.resume=none
finish
