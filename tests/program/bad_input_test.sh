#!/usr/bin/env bash
# What is wrong is said once: what, where, what was expected, what to do; with the exit code of its kind, and at once.
#   bad_input_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run

# refused CODE RANKS TEXT... -- [ARGUMENTS OF train]: the tiny run with these is refused and leaves no checkpoint.
refused() {
  local code=$1 n=$2 texts=()
  shift 2
  while [ "$1" != -- ]; do
    texts+=("$1")
    shift
  done
  shift
  expect "$code" "${texts[0]}" train "$n" run "$@"
  said "${texts[@]}"
  said_once
}

# ---- the config
sed 's/^hidden_size/hiden_size/' tiny.toml >key.toml
expect 2 'unknown key model.hiden_size in key.toml:3' ranks 2 "$program" train key.toml
said 'did you mean' 'hidden_size'
said_once
sed 's/^steps = 20/steps = "twenty"/' tiny.toml >type.toml
expect 2 'train.steps in type.toml:11 is a string "twenty"; expected an integer' ranks 2 "$program" train type.toml
said_once
sed 's/^steps = 20/steps = /' tiny.toml >syntax.toml
expect 2 'syntax.toml:11:' ranks 2 "$program" train syntax.toml
said 'not TOML'
said_once
expect 2 'cannot read config none.toml: No such file or directory' ranks 2 "$program" train none.toml
said_once
expect 2 'config data is a folder' ranks 2 "$program" train data
expect 2 'unknown subcommand "trian" (did you mean "train"?)' ranks 2 "$program" trian
said_once
refused 2 2 'train.step' 'did you mean train.steps?' -- --set train.step=3
refused 2 2 'expected section.key=value' -- --set steps
refused 2 2 'train.steps' 'expected' -- --set train.steps=0 --set schedule.warmup_steps=0
refused 2 2 'train.steps' 'is the number 1.5; expected an integer' -- --set train.steps=1.5
refused 2 2 'optimizer.lr' 'expected' -- --set optimizer.lr=-1
refused 2 2 'optimizer.lr' 'expected' -- --set optimizer.lr=nan
refused 2 2 'model.num_key_value_heads = 3' 'num_attention_heads = 4' -- --set model.num_key_value_heads=3
refused 2 2 'model.hidden_size = 32' 'model.num_attention_heads = 5' -- --set model.num_attention_heads=5 --set model.num_key_value_heads=5
refused 2 2 'model.vocab_size = 256' 'at least 257' -- --set model.vocab_size=256
refused 2 2 'train.sequence_length = 97' '2 sequence ranks' 'Lengths that fit: 96 and 100' -- --set train.sequence_length=97
refused 2 3 'train.sequence_length = 100' '3 sequence ranks' 'Lengths that fit: 96 and 102' -- --set train.sequence_length=100
refused 2 3 'parallel.data = 2' 'a divisor of the number of ranks, 3' -- --set parallel.data=2
refused 2 2 '3 × 1 = 3' 'the number of ranks, 2' 'mpirun -np 3' -- --set parallel.sequence=3 --set parallel.data=1
refused 2 2 'train.global_batch = 3' 'a multiple of' '2 or 4 would fit' -- --set train.global_batch=3 --set parallel.data=2
refused 2 2 'train.global_batch = 2' '4 would fit' -- --set train.micro_batch=4
refused 2 2 'eval.every = 5' 'data.validation' -- --set eval.every=5
refused 2 2 'checkpoint.keep' 'expected' -- --set checkpoint.keep=1
refused 2 2 'parallel.layout' '"zigzag" or "contiguous"' -- --set parallel.layout=zigzig
refused 2 2 'train.precision = "bf16"' 'fp32' -- --set train.precision=bf16 --set parallel.device=cpu
# Where no GPU is. (An empty list hides those that are.)
CUDA_VISIBLE_DEVICES='' refused 2 2 'parallel.device = "cuda"' '"cpu" or "auto"' -- --set parallel.device=cuda

# ---- data
data() { refused 3 2 "${@:2}" -- --set "data.sources=[\"$1\"]"; }
none() { refused 3 2 "${@:2}" -- --set "data.sources=[\"$1\"]" --set data.tokenizer=none --set model.vocab_size=64; }
: >empty.txt
data empty.txt 'empty.txt: empty file'
data missing.txt 'missing.txt: no such file or folder'
data book.pdf 'book.pdf: no such file or folder'
cp data/long.txt book.pdf
data book.pdf 'book.pdf: expected a .txt, .jsonl or .bin file'
mkdir nothing
data nothing 'nothing: no .txt, .jsonl or .bin file'
printf '{"text": "fine"}\n{"text": "not closed}\n' >broken.jsonl
data broken.jsonl 'broken.jsonl:2: invalid JSON at column 22' 'end of the line'
printf '{"text": "fine"}\n\n{"txt": "typo"}\n' >keys.jsonl
data keys.jsonl 'keys.jsonl:3:' 'txt'
printf '{"text": "caf\351"}\n' >latin.jsonl
data latin.jsonl 'latin.jsonl:1:' 'UTF-8'
printf '\n\n' >blank.jsonl
data blank.jsonl 'blank.jsonl: no document in it'
printf '{"tokens": [1, 2, 300]}\n' >ids.jsonl
data ids.jsonl 'ids.jsonl:1: token 2 is 300, outside the vocabulary of 257 (ids 0 to 256)'
printf '{"tokens": [1, -2]}\n' >negative.jsonl
data negative.jsonl 'negative.jsonl:1: token 1 is -2, outside the vocabulary'
printf '{"tokens": [1, 2, 3], "mask": [1, 0]}\n' >mask.jsonl
data mask.jsonl 'mask.jsonl:1:' 'mask'
none data/long.txt 'data/long.txt: text, but data.tokenizer = "none" reads only tokens'
refused 3 2 'short: no such file or folder' -- --set 'data.validation=["short"]'

# word NUMBER: a little-endian int32. token_file MAGIC VERSION COUNT FILE: llm.c's header; tokens follow.
word() { printf "\\x$(printf %02x $(($1 & 255)))\\x$(printf %02x $(($1 >> 8 & 255)))\\x$(printf %02x $(($1 >> 16 & 255)))\\x$(printf %02x $(($1 >> 24 & 255)))"; }
token_file() {
  { word "$1"; word "$2"; word "$3"; head -c 1012 /dev/zero; } >"$4"
}
token_file 20240520 1 4 good.bin
printf '\1\0\2\0\3\0\4\0' >>good.bin
expect 0 'saved' train 2 tokens --set 'data.sources=["good.bin"]' --set data.tokenizer=none --set model.vocab_size=64
token_file 20240520 1 4 ids.bin
printf '\1\0\2\0\100\0\4\0' >>ids.bin
none ids.bin 'ids.bin: token 2 (byte 1028) is 64, outside the vocabulary of 64 (ids 0 to 63)'
token_file 20240520 1 1000000000 long.bin
printf '\1\0\2\0' >>long.bin
none long.bin 'long.bin: the header announces 1000000000 tokens' 'but the file has 1028' 'cut short'
token_file 20240520 1 1 short.bin
printf '\1\0\2\0' >>short.bin
none short.bin 'short.bin: the header announces 1 tokens' 'too long, or its header is wrong'
token_file 12345 1 1 magic.bin
printf '\1\0' >>magic.bin
none magic.bin 'magic.bin: magic number 12345 at byte 0: expected'
token_file 20240520 7 1 version.bin
printf '\1\0' >>version.bin
none version.bin 'version.bin: version 7 at byte 4: expected 1'
head -c 100 good.bin >header.bin
none header.bin 'header.bin: 100 bytes' 'a header of 1024'
[ -z "$(newest run 2>/dev/null)" ] || fail "a run that was refused left a checkpoint"

# Ranks that do not see the same: each in a folder of its own.
mkdir rank-0 rank-1
cp tiny.toml rank-0
cp tiny.toml rank-1
printf 'some text\n' >rank-0/text.txt
printf 'some test\n' >rank-1/text.txt
cat >apart.sh <<'END'
cd "rank-$OMPI_COMM_WORLD_RANK" && exec "$@" --set 'data.sources=["text.txt"]'
END
expect 2 'the ranks disagree on the training data: rank 1 of 2 differs from rank 0' ranks 2 bash apart.sh "$program" \
  train tiny.toml --set parallel.data=2
said_once
sed -i 's/^steps = 20/steps = 30/' rank-1/tiny.toml
expect 2 'the ranks disagree on the configuration: rank 1 of 2' ranks 2 bash apart.sh "$program" train tiny.toml
said_once

# ---- checkpoints
expect 0 'saved' train 2 good
evaluate() { expect "$1" "$2" ranks 2 "$program" evaluate "$3" --data held_out.txt "${@:4}"; }
evaluate 4 'nothing: is none; wanted a checkpoint' nothing
said_once
evaluate 4 'nowhere: is not there; wanted a checkpoint' nowhere
said_once
evaluate 2 'stride' good --stride 97
said_once
evaluate 2 'train.precision = "half"' good --precision half
said_once
expect 3 'missing.txt: no such file' ranks 2 "$program" evaluate good --data missing.txt
said_once
cp -r good corrupt
for step in 10 20; do sed -i 's/"seed": 0/"seed": 1/' corrupt/step-000000$step/manifest.json; done
evaluate 4 'corrupt: no checkpoint of this run folder is whole' corrupt
said 'step-00000010' 'step-00000020' 'the manifest was damaged or edited'
said_once
evaluate 4 'corrupt/step-00000020/manifest.json: checksum is' corrupt/step-00000020
said_once
expect 4 'the manifest was damaged or edited' "$program" inspect corrupt/step-00000020

refused_resume() { # TEXT... -- ARGUMENTS: the folder of another run
  local texts=()
  while [ "$1" != -- ]; do
    texts+=("$1")
    shift
  done
  expect 4 "${texts[0]}" train 2 good --set train.steps=30 "${@:2}"
  said "${texts[@]}"
  said_once
}
refused_resume 'good/step-00000020: tensor model/model.embed_tokens.weight: wanted shape [257, 64], found [257, 32]' \
  -- --set model.hidden_size=64
refused_resume 'good/step-00000020: tensor model.layers.1.' 'has no place in the model of the config' \
  -- --set model.num_hidden_layers=1
refused_resume 'good/step-00000020: tensor model/model.layers.2.' 'is wanted, not found' \
  -- --set model.num_hidden_layers=3
[ "$(newest good)" = step-00000020 ] || fail "a run that was refused changed the folder"
expect 4 'elsewhere: is not there; wanted a checkpoint' train 2 fresh --set checkpoint.resume=elsewhere
said_once
expect 0 'going on from good/step-00000010 (step 10)' train 2 fresh --set checkpoint.resume=good/step-00000010
have_steps 11 20 fresh

# ---- the run folder
refused_folder() { # CODE TEXT FOLDER
  expect "$1" "$2" train 2 "$3"
  said_once
}
refused_folder 4 'tiny.toml/run' tiny.toml/run
refused_folder 4 'tiny.toml' tiny.toml
refused_folder 4 '/proc/annulus' /proc/annulus
if [ "$(id -u)" -ne 0 ]; then
  mkdir locked
  chmod 500 locked
  refused_folder 4 'nothing can be written into the run folder: Permission denied' locked
fi
# Two runs in one folder: the second is refused, the first ends as if nothing had been.
mpirun -np 2 --oversubscribe --bind-to none --timeout 60 "$program" train tiny.toml --set checkpoint.dir=shared \
  --set train.steps=1000000 --set schedule.type=constant --set checkpoint.every=0 >first 2>&1 &
first=$!
if wait_for_step 3 shared; then
  refused_folder 2 'shared: another run uses this folder (process ' shared
  said 'choose another checkpoint.dir'
fi
kill -USR1 "$first"
wait "$first"
code=$?
[ "$code" -eq 75 ] || fail "the first run ended with $code" first
finish
