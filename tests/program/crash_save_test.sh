#!/usr/bin/env bash
# SIGKILL of a rank at every named point of a save, then damage to files: starting again goes on from the newest whole
# checkpoint, says what it passed over, and ends where a run without accidents ends.   crash_save_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run
every_rank=(before_folder after_shard_create after_first_dataset mid_datasets before_shard_close before_shard_fsync
  after_shard before_gather)
rank_0=(before_virtual_file after_virtual_file before_manifest mid_manifest after_manifest)
committed=(after_rename before_prune during_prune mid_delete) # rank 0 as well
# A run saves once, at its end, and waits for that: what is on the disk does not depend on how fast it is.
run_to() { train 2 "$2" --set "train.steps=$1" --set checkpoint.every=0 --set schedule.type=constant --set schedule.warmup_steps=0; }
name_of() { printf 'step-%08d' "$1"; }

ANNULUS_FAULT=nowhere:1 expect 2 'ANNULUS_FAULT="nowhere:1" is not point[:rank][@step]' train 2 none
for point in "${every_rank[@]}" "${rank_0[@]}" "${committed[@]}"; do said " $point"; done
[ "$(grep -o 'one of the points .*' out | wc -w)" -eq $((4 + ${#every_rank[@]} + ${#rank_0[@]} + ${#committed[@]})) ] ||
  fail "there are points that this test does not know" out
expect 0 'saved' run_to 24 undisturbed

# One run, started again after every kill for two steps more.
last=0 # step of the newest checkpoint
crash() { # POINT RANK AFTER: after the kill, step AFTER is the newest whole checkpoint
  local from half
  from="going on from run/$(name_of "$last") (step $last)"
  half=$(find run -maxdepth 1 -name '*.tmp' -printf '%f\n' 2>/dev/null)
  ANNULUS_FAULT="$1:$2" expect 137 "$from" run_to $((last + 2)) run
  [ -z "$half" ] || said "$half skipped: the save was interrupted before it was complete"
  last=$3
  [ "$(newest run)" = "$(name_of "$last")" ] ||
    fail "after $1 on rank $2 the newest checkpoint is not that of step $last but $(newest run)" out
}
ANNULUS_FAULT=after_shard:1 expect 137 '2 ranks' run_to 2 run
[ -z "$(newest run)" ] || fail "a checkpoint without a manifest" out
expect 0 'step-00000002.tmp skipped: the save was interrupted' run_to 2 run
last=2
for point in "${every_rank[@]}"; do
  for rank in 0 1; do crash "$point" "$rank" "$last"; done
done
for point in "${rank_0[@]}"; do crash "$point" 0 "$last"; done
for point in "${committed[@]}"; do crash "$point" 0 "$((last + 2))"; done
expect 0 "going on from run/$(name_of "$last") (step $last)" run_to 22 run
expect 0 "going on from run/step-00000022 (step 22)" run_to 24 run
have_steps 1 24 run
diff <(steps_of undisturbed) <(steps_of run) >differ || fail "the run with kills has other losses" differ
diff <(weights_of undisturbed/step-00000024) <(weights_of run/step-00000024) >differ || fail "and other weights" differ
[ "$(find run -mindepth 1 -maxdepth 1 -name '*step-*' -printf '%f\n' | sort | paste -sd' ')" = \
  'step-00000022 step-00000024' ] || fail "left behind: $(ls -A run)"

# Damage. The newest of two checkpoints, 22 and 24, is damaged; 22 is whole.
damaged() { # NAME WORDS...: prepare `NAME` before; the run goes on from 22 and says why 24 is not it
  local name=$1
  expect 0 "going on from $name/step-00000022 (step 22)" run_to 24 "$name"
  said "step-00000024 skipped: " "${@:2}" 'step-00000024 is newer than step 22: renamed to aside-step-00000024'
  have_steps 1 24 "$name"
  diff <(weights_of run/step-00000024) <(weights_of "$name/step-00000024") >differ || fail "$name: other weights" differ
}
for name in truncated flipped missing edited no_shard; do cp -r run "$name"; done
shard=step-00000024/shard-00001.h5
truncate -s -1000 "truncated/$shard"
damaged truncated "truncated/$shard" 'wanted' 'bytes, found'
# One bit in the middle: of a tensor, and each piece has its own hash.
size=$(stat -c %s "flipped/$shard")
byte=$(od -An -tu1 -j $((size / 2)) -N 1 "flipped/$shard")
printf "\\x$(printf %x $((byte ^ 16)))" | dd of="flipped/$shard" bs=1 seek=$((size / 2)) conv=notrunc status=none
damaged flipped "flipped/$shard" 'the values are damaged'
rm missing/step-00000024/manifest.json
damaged missing 'missing/step-00000024: no manifest.json'
sed -i 's/"step": 24/"step": 22/' edited/step-00000024/manifest.json
damaged edited 'edited/step-00000024/manifest.json' 'the manifest was damaged or edited'
rm "no_shard/$shard"
damaged no_shard "no_shard/$shard" 'missing'

# None is whole: it does not start anew by itself, which would cut back what is there.
cp -r run none_whole
for step in 22 24; do truncate -s 100 "none_whole/step-000000$step/manifest.json"; done
before=$(cat none_whole/metrics.jsonl)
expect 4 'no checkpoint of this run folder is whole; move it away' train 2 none_whole
said 'step-00000022 skipped' 'step-00000024 skipped'
said_once
[ "$before" = "$(cat none_whole/metrics.jsonl)" ] || fail "the metrics were touched"
finish
