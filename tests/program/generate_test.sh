#!/usr/bin/env bash
# generate: text, JSON, seeds and threads, where it stops, and bad input.   generate_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run
expect 0 'saved' train 1 run --set 'model.attention=["dense", "nsa"]' --set model.nsa.window=16

generate() { expect 0 '"tokens":' "$program" generate run --json "$@"; }
field() { sed "s/.*\"$1\":\(\[[^]]*\]\|\"[^\"]*\"\|[^,}]*\).*/\1/" out; }
count() { field tokens | tr ',' '\n' | wc -l; }

generate --prompt 'a short' --max-new 12
[ "$(wc -l <out)" -eq 1 ] || fail "not one line" out
[ "$(field prompt_tokens)" -eq 8 ] || fail "seven bytes behind an end of document" out
[ "$(count)" -le 12 ] || fail "more than --max-new" out
[ "$(field cache_bytes)" -gt 0 ] || fail "no cache" out
greedy=$(field tokens)
# The prompt as token ids is the same prompt; greedy is the default and knows no seed; threads change nothing.
generate --tokens 256,97,32,115,104,111,114,116 --max-new 12 --seed 9
[ "$(field tokens)" = "$greedy" ] || fail "the same prompt as tokens goes on otherwise" out
for threads in 1 2 3; do
  OMP_NUM_THREADS=$threads generate --prompt 'a short' --max-new 40 --temperature 1 --seed 5
  drawn=${drawn:-$(field tokens)}
  [ "$(field tokens)" = "$drawn" ] || fail "other draws with $threads threads" out
done
generate --prompt 'a short' --max-new 40 --temperature 1 --seed 6
[ "$(field tokens)" != "$drawn" ] || fail "another seed draws the same" out
# As text.
"$program" generate run --prompt 'a short' --max-new 12 --temperature 1 --seed 5 >text 2>speed || fail "plain text" speed
grep -q 'tokens of prompt at' speed || fail "no speed" speed

# It stops where the context is full: the last token needs no place.
generate --prompt 'a short' --max-new 500 --temperature 3 --seed 1
case $(field stopped) in
  '"context"') [ "$(count)" -eq $((96 - 8 + 1)) ] || fail "stopped short of the context" out ;;
  '"end_of_document"') [ "$(field tokens | tr -d ']' | tr ',' '\n' | tail -n 1)" -eq 256 ] || fail "no end" out ;;
  *) fail "where did it stop" out ;;
esac
generate --prompt 'a short' --max-new 500 --temperature 3 --seed 1 --sequence-length 10
[ "$(count),$(field stopped)" = '3,"context"' ] || fail "a context of ten" out

bad() { expect "$1" "$2" "$program" generate "${@:3}" && said_once; }
bad 2 'no prompt; give --prompt TEXT, or --tokens' run
bad 2 'give one of them' run --prompt a --tokens 1
bad 2 '--prompt is empty' run --prompt ''
bad 2 '257 is no token of this model; expected 0 to 256' run --tokens 1,257
bad 2 '"x" is none' run --tokens 1,x
bad 2 '--temperature -1: expected' run --prompt a --temperature=-1
bad 2 '--top-p 0: expected' run --prompt a --top-p 0
bad 2 '--top-p 1.5: expected' run --prompt a --top-p 1.5
bad 2 '--max-new' run --prompt a --max-new 0
bad 2 'the prompt has 100 tokens and the context 96' run --tokens "$(seq -s , 1 100)"
bad 4 'nowhere: is not there' nowhere --prompt a
expect 2 'generate runs as one process; this is a job of 2 ranks' ranks 2 "$program" generate run --prompt a
said_once
finish
