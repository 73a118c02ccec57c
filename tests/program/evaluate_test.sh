#!/usr/bin/env bash
# evaluate: the same for any number of ranks, JSON, and the relation of its numbers.   evaluate_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run
expect 0 'saved' train 2 run --set train.steps=40 --set 'data.validation=["held_out.txt"]' --set eval.every=20

# score N ARGUMENTS: on N ranks; one line of JSON in `out`.
score() {
  expect 0 '"loss":' ranks "$1" "$program" evaluate run --json "${@:2}"
  [ "$(wc -l <out)" -eq 1 ] || fail "not one line" out
  grep -Eq '^\{"loss":[0-9.e-]+,"perplexity":[0-9.e+-]+,"bits_per_byte":(null|[0-9.e-]+),"accuracy":[0-9.e-]+,"tokens":[0-9]+,"window":[0-9]+,"stride":[0-9]+,"by_position":\[(\{"upto":[0-9]+,"loss":[0-9.e-]+,"accuracy":[0-9.e-]+,"tokens":[0-9]+\},?)+\]\}$' out ||
    fail "not the JSON of the documentation" out
}
field() { sed "s/\"by_position.*//; s/.*\"$1\":\([^,]*\),.*/\1/" out; }
# close A B TOLERANCE TEXT: relative.
close() {
  awk -v a="$1" -v b="$2" -v t="$3" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(d <= t * (b < 0 ? -b : b)) }' ||
    fail "$4: $1 and $2 differ by more than $3" out
}

score 1 --data held_out.txt
loss=$(field loss)
bytes=$(stat -c %s held_out.txt)
[ "$(field tokens)" -eq "$bytes" ] || fail "every byte is a target: $bytes"
[ "$(field window),$(field stride)" = 96,96 ] || fail "window and stride" out
close "$(field bits_per_byte)" "$(awk -v l="$loss" 'BEGIN { printf "%.12g", l / log(2) }')" 1e-8 'bits per byte'
close "$(field perplexity)" "$(awk -v l="$loss" 'BEGIN { printf "%.12g", exp(l) }')" 1e-8 perplexity
# The mean over positions is the whole, and they cover every token.
tr '{' '\n' <out | sed -n 's/"upto":\([0-9]*\),"loss":\([^,]*\),"accuracy":\([^,]*\),"tokens":\([0-9]*\).*/\1 \2 \4 \3/p' >positions
read -r n mean right <<<"$(awk '{ n += $3; sum += $2 * $3; right += $4 * $3 } END { printf "%d %.12g %.9g", n, sum / n, right / n }' positions)"
[ "$n" -eq "$bytes" ] || fail "positions hold $n of $bytes tokens" out
close "$mean" "$loss" 1e-7 'mean over positions'
# 40 steps teach that spaces and commas are frequent, and little else: more than one in 257, far from all.
accuracy=$(field accuracy)
close "$right" "$accuracy" 1e-7 'accuracy over positions'
awk -v a="$accuracy" 'BEGIN { exit !(a > 0.05 && a < 0.9) }' || fail "an accuracy of $accuracy" out
# The trainer's own evaluation of this checkpoint.
trained=$(sed -n 's/.*"kind":"eval","step":40,"loss":\([^,]*\),.*/\1/p' run/metrics.jsonl)
close "$loss" "$trained" 1e-6 'loss while training'

cp out one
for n in 2 3; do
  score "$n" --data held_out.txt
  close "$(field loss)" "$loss" 1e-6 "loss on $n ranks"
  [ "$(field tokens)" -eq "$bytes" ] || fail "tokens on $n ranks" out
  # Exact but for near-ties that rounding turns.
  awk -v a="$(field accuracy)" -v b="$accuracy" -v n="$bytes" 'BEGIN { d = (a - b) * n; exit !(d < 1.5 && d > -1.5) }' ||
    fail "an accuracy of $(field accuracy) on $n ranks, $accuracy on one" out
done
score 1 --data held_out.txt --stride 96
cmp out one || fail "a stride of the window is the default" out
# Overlapping windows: as many tokens, each with more before it.
score 2 --data held_out.txt --stride 32
[ "$(field tokens),$(field stride)" = "$bytes,32" ] || fail "each token is scored once" out
close "$(field loss)" "$loss" 0.2 'overlapping windows'
[ "$(field loss)" != "$loss" ] || fail "a stride of a third changed nothing" out
again=$(field loss)
score 3 --data held_out.txt --stride 32
close "$(field loss)" "$again" 1e-6 'overlapping windows on 3 ranks'
# Documents of tokens have no bytes, and their first token is no target.
printf '{"tokens": [104, 101, 108, 108, 111]}\n' >tokens.jsonl
score 2 --data tokens.jsonl
[ "$(field tokens),$(field bits_per_byte)" = 4,null ] || fail "a document of five tokens has four targets" out
# Several files, and a window of another length.
score 2 --data held_out.txt data --sequence-length 48
[ "$(field window),$(field stride)" = 48,48 ] || fail "window" out
[ "$(field tokens)" -gt "$bytes" ] || fail "the second source is missing" out
expect 0 'bits per byte' ranks 2 "$program" evaluate run/step-00000040 --data held_out.txt
said "accuracy       $(printf %.4f "$accuracy") of the targets" "tokens scored  $bytes" 'window 96, stride 96'

# ---- sparse layers
expect 2 '--without window: the model has no sparse layer' "$program" evaluate run --data held_out.txt --without window
expect 0 'saved' train 2 sparse --set model.attention=nsa --set model.nsa.block=8 --set model.nsa.stride=4 \
  --set model.nsa.select_block=8 --set model.nsa.select_count=4 --set model.nsa.window=9 --set train.steps=5
expect 0 '"without":["selected","window"]}' ranks 2 "$program" evaluate sparse --data held_out.txt --json \
  --without selected --without window
expect 0 'without        compressed' "$program" evaluate sparse --data held_out.txt --without compressed
finish
