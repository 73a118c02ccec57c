#!/usr/bin/env bash
# prepare: files that train and evaluate read, the same for the same seed, whole or not at all.   prepare_test.sh PROGRAM
source "$(dirname "$0")/common.sh"

recall() { "$program" prepare recall "$@"; }
small=(--documents 40 --length 48 --pairs 4 --gap-min 16 --vocab 64)
expect 0 'a.jsonl: 40 documents of 48 tokens and 4 answers' recall a.jsonl "${small[@]}" --seed 3
expect 0 '{"documents":40,"tokens":1920,"targets":160,"format":"jsonl, tokens and mask"}' \
  recall b.jsonl "${small[@]}" --seed 3 --json
[ "$(wc -l <out)" -eq 1 ] || fail "not one line" out
cmp a.jsonl b.jsonl || fail "the same seed made other bytes"
recall c.jsonl "${small[@]}" --seed 4 >out || fail "another seed" out
cmp -s a.jsonl c.jsonl && fail "another seed made the same documents"
recall d.jsonl "${small[@]}" --seed 3 --documents 10 >out 2>&1 && fail "an option twice" out
recall d.jsonl --documents 10 "${small[@]:2}" --seed 3 >out || fail "fewer documents" out
cmp d.jsonl <(head -n 10 a.jsonl) || fail "a document depends on how many there are"
[ "$(grep -Ec '^\{"tokens":\[[0-9,]+\],"mask":\[[01,]+\]\}$' a.jsonl)" -eq 40 ] || fail "not the documented lines" a.jsonl
# Filler, keys and values have their own ids; the other options are heard too.
expect 0 '{"documents":5,"tokens":320,"targets":5,' recall e.jsonl --documents 5 --length 64 --pairs 3 --queries 1 \
  --pair-span 20 --gap-min 30 --vocab 40 --filler-ids 20 --json
tokens() { sed 's/.*"tokens":\[\([^]]*\)\].*/\1/' "$1"; }
[ "$(tokens e.jsonl | tr , '\n' | sort -n | tail -n 1)" -lt 40 ] || fail "an id outside the vocabulary" e.jsonl
[ "$(tokens e.jsonl | cut -d, -f21-49 | tr , '\n' | awk '$1 < 20' | wc -l)" -eq $((5 * 29)) ] ||
  fail "no gap of 29 filler tokens" e.jsonl

# ---- passkey
expect 0 '{"documents":6,"tokens":1200,"targets":30,"format":"jsonl, tokens and mask"}' \
  "$program" prepare passkey p.jsonl --documents 6 --length 200 --depth 0.5 --json
expect 2 '99999999999999999999: expected an integer' "$program" prepare passkey q.jsonl --seed 99999999999999999999
expect 3 'there is no folder no/where; make it first' "$program" prepare passkey no/where/q.jsonl
expect 2 'p.jsonl exists' "$program" prepare passkey p.jsonl
expect 2 '--depth = 2: expected a share of the filler' "$program" prepare passkey q.jsonl --depth 2
[ ! -e q.jsonl ] || fail "a refused file is there"

# ---- train and evaluate on it
tiny_run
expect 0 'saved run/step-00000010' train 2 run --set 'data.sources=["a.jsonl"]' --set 'data.validation=["c.jsonl"]' \
  --set data.tokenizer=none --set model.vocab_size=64 --set train.sequence_length=48 --set train.steps=10
said 'eval 10 | loss' '160 tokens'
expect 0 'saved bytes' train 1 bytes --set 'data.sources=["p.jsonl"]' --set train.sequence_length=200 --set train.steps=5
expect 0 '"tokens":30,"window":200' ranks 2 "$program" evaluate bytes --data p.jsonl --json
expect 0 '"tokens":160,"window":48' ranks 2 "$program" evaluate run --data c.jsonl --json

# ---- refused: nothing is written, and what was there stays
before=$(ls)
refused() { # CODE TEXT ARGUMENTS...
  expect "$1" "$2" recall "${@:3}"
  said_once
  [ "$(ls)" = "$before" ] || fail "a file is left: $(ls)"
}
refused 2 'a.jsonl exists; name another file, or replace it with --force' a.jsonl "${small[@]}"
cmp a.jsonl b.jsonl || fail "the file that was there has changed"
refused 2 'DST = f.txt: expected a name that ends in .jsonl' f.txt
refused 3 'none/f.jsonl cannot be written: there is no folder none; make it first' none/f.jsonl
refused 2 '--length = 100: expected at least 16 tokens for the pairs + 89 of --gap-min 90 + 16 for the queries = 121; --length 121 or --gap-min 69 would fit' \
  f.jsonl --length 100 --gap-min 90
refused 2 '--pairs = 30: expected at most 15, the number of keys that --vocab 32 has' f.jsonl --vocab 32 --pairs 30
refused 2 'unexpected argument "--pais" (did you mean "--pairs"?); see annulus prepare recall --help' f.jsonl --pais 3
expect 2 'unknown subcommand "recal" (did you mean "recall"?); see annulus prepare --help' "$program" prepare recal f.jsonl
expect 2 'A subcommand is required; see annulus prepare --help' "$program" prepare
expect 0 'Usage: annulus prepare recall' recall --help
expect 0 'Subcommands:' "$program" prepare --help
# A disk that is full: a limit to the size of files stands for it.
full() { (
  trap '' XFSZ
  ulimit -f 8 # KiB
  exec "$program" prepare recall "$@"
); }
expect 3 'f.jsonl cannot be written: write: File too large; nothing is left of it' full f.jsonl "${small[@]}"
expect 3 'a.jsonl cannot be written: write: File too large' full a.jsonl --force "${small[@]}"
[ "$(ls)" = "$before" ] || fail "a part of a file is left: $(ls)"
cmp a.jsonl b.jsonl || fail "a full disk has cost the file that was there"
expect 0 '40 documents' recall a.jsonl --force "${small[@]}" --seed 4
cmp a.jsonl c.jsonl || fail "--force did not replace the file"
finish
