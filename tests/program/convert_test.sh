#!/usr/bin/env bash
# convert: between checkpoints and HuggingFace folders, fewer key/value heads, sparse attention; and every MODEL that is a
# HuggingFace folder.   convert_test.sh PROGRAM
fixtures=$(cd "$(dirname "$0")/../fixtures/hf" && pwd)
source "$(dirname "$0")/common.sh"
tiny_run
expect 0 'saved' train 2 run --set train.steps=40

convert() { expect "$1" "$2" "$program" convert "${@:3}"; }
# loss_of RANKS MODEL [ARGUMENTS]: of the held-out text, in fp64, which any number of ranks agrees on; into `loss`.
loss_of() {
  expect 0 '"loss":' ranks "$1" "$program" evaluate "$2" --data held_out.txt --json --precision fp64 "${@:3}"
  loss=$(sed 's/.*"loss":\([^,]*\),"perp.*/\1/' out)
}
# near A B TOLERANCE TEXT: relative.
near() {
  awk -v a="$1" -v b="$2" -v t="$3" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(d <= t * b) }' ||
    fail "$4: $1 and $2 differ by more than $3"
}
json() { # what one line of JSON says: KEY must be followed by VALUE
  [ "$(wc -l <out)" -eq 1 ] || fail "not one line" out
  grep -qF "\"$1\":$2" out || fail "no \"$1\":$2" out
}

# ---- what HuggingFace computes, from the folder and from its conversion
for name in llama-mha llama-gqa-llama3rope qwen3-qknorm; do
  hf=$fixtures/$name
  sed -n 's/.*"input_ids": \[\[\([^]]*\)\], \[\([^]]*\)\]\].*/{"tokens": [\1]}\n{"tokens": [\2]}/p' "$hf/expected.json" >held_out.jsonl
  wanted=$(sed 's/.*"loss": \([0-9.]*\).*/\1/' "$hf/expected.json")
  convert 0 'written' "$hf" "from-$name"
  for model in "$hf" "from-$name"; do
    for precision in fp64:1e-6 fp32:2e-5; do
      expect 0 '"loss":' "$program" evaluate "$model" --data held_out.jsonl --json --precision "${precision%:*}"
      near "$(sed 's/.*"loss":\([^,]*\),"perp.*/\1/' out)" "$wanted" "${precision#*:}" "$model in ${precision%:*}"
    done
  done
done
expect 0 '"format":"huggingface"' "$program" inspect "$fixtures/llama-yarn-bf16" --json
said '"name":"lm_head.weight","shape":[67,24],"dtype":"bfloat16"' '"parameters":13704'
expect 0 'no recipe' "$program" inspect from-llama-mha --verify
expect 2 'safetensors files have no checksums' "$program" inspect "$fixtures/llama-mha" --verify
convert 0 'float16 -> float32 in 21 tensors' "$fixtures/llama-linear-fp16" half

# ---- a run's checkpoint: identity, and there and back
loss_of 1 run
before=$loss
convert 0 'optimizer/m' run same --json
json format '"checkpoint"'
json changed '[]'
json dropped '["optimizer/m","optimizer/v"]'
loss_of 2 same
near "$loss" "$before" 1e-9 'converted to itself'
expect 0 'sources = ' "$program" inspect same
said 'converted from run/step-00000040 (step 40)' 'step        40'
[ "$(weights_of same | grep '"group":"model"' | grep -o '"tensor.*')" = "$(weights_of same | grep -o '"tensor.*')" ] ||
  fail "more than the weights are there"
convert 0 'huggingface' run hf --format huggingface
loss_of 1 hf
near "$loss" "$before" 1e-9 'a HuggingFace folder'
loss_of 3 hf
near "$loss" "$before" 1e-9 'a HuggingFace folder on three ranks'
convert 0 'written' hf/ back/
loss_of 1 back
near "$loss" "$before" 1e-9 'there and back'
[ ! -e back.tmp ] && [ ! -e hf.tmp ] || fail "something temporary stayed"
# From a HuggingFace folder to another, with what lies beside the weights.
echo '{}' >hf/tokenizer.json
echo 'else' >hf/other.txt
mkdir hf2.tmp
convert 0 'written' hf hf2 --format huggingface
cmp hf/model.safetensors hf2/model.safetensors || fail "another file of the same tensors"
[ "$(find hf2 -type f -printf '%f\n' | sort | tr '\n' ' ')" = 'config.json model.safetensors tokenizer.json ' ] ||
  fail "wrong files in hf2"
[ ! -e hf2.tmp ] || fail "what an interrupted conversion left is still there"

# ---- heads
for pool in mean first random; do
  convert 0 'num_key_value_heads 2 -> 1' run "heads-$pool" --kv-heads 1 --pool "$pool" --json
  json written "{\"path\":\"heads-$pool\",\"format\":\"checkpoint\",\"tensors\":20"
  loss_of 1 "heads-$pool"
  eval "loss_$pool=$loss"
done
[ "$loss_mean" != "$loss_first" ] && [ "$loss_first" != "$loss_random" ] || fail "pooling makes no difference"
expect 0 'num_key_value_heads = 1' "$program" inspect heads-mean
convert 0 'written' run heads-2 --kv-heads 2 --pool first
loss_of 1 heads-2
near "$loss" "$before" 1e-9 'as many heads as there are'
convert 0 'mean of 2' hf heads-hf --kv-heads 1 --format huggingface
loss_of 1 heads-hf
near "$loss" "$loss_mean" 1e-9 'pooled in a HuggingFace folder'

# ---- sparse attention
small=(--set model.nsa.block=4 --set model.nsa.stride=2 --set model.nsa.select_block=8 --set model.nsa.select_count=4
  --set model.nsa.window=12)
convert 0 'attention dense -> nsa in 2 layers' run sparse --attention nsa "${small[@]}"
loss_of 1 sparse
sparse=$loss
near "$sparse" "$before" 0.2 'sparse attention starts near dense'
loss_of 2 sparse
near "$loss" "$sparse" 1e-9 'sparse attention on two ranks'
expect 0 'window = 12' "$program" inspect sparse
convert 0 'num_key_value_heads 2 -> 1' run sparse-1 --attention nsa "${small[@]}" --kv-heads 1
convert 0 'num_key_value_heads 2 -> 1' sparse sparse-2 --kv-heads 1
loss_of 1 sparse-1
near "$(loss_of 1 sparse-2 && echo "$loss")" "$loss" 1e-7 'both orders of the two conversions'
convert 2 'model.attention has "nsa" layers, which no HuggingFace model has' sparse no --format huggingface
said_once

# ---- what is wrong
convert 2 'same: is there already' run same
cp -r same no.tmp
convert 2 'no is written there first' no.tmp no
convert 2 'no is written there first' ./no.tmp/ no
[ -e no.tmp/manifest.json ] || fail "the source is gone"
rm -r no.tmp
convert 4 'nowhere: is not there; wanted a checkpoint' nowhere no
convert 4 'data: is none; wanted a checkpoint' data no
convert 2 '--kv-heads 3: expected a divisor of the 2 key/value heads of run' run no --kv-heads 3
convert 2 '--kv-heads 4: expected a divisor' run no --kv-heads 4
convert 2 '--pool meen: expected' run no --kv-heads 1 --pool meen
said 'did you mean "mean"?'
convert 2 '--format' run no --format gguf
convert 2 '--attention' run no --attention dens
convert 2 'a conversion sets only keys of model.nsa' run no --attention nsa --set train.steps=1
convert 2 'unknown key model.nsa.windows' run no --attention nsa --set model.nsa.windows=1
convert 2 'model.nsa.stride = 3' run no --attention nsa --set model.nsa.stride=3
convert 2 '--set goes with --attention nsa' run no --set model.nsa.window=5
cp -r hf broken
head -c 5000 hf/model.safetensors >broken/model.safetensors
convert 4 'broken/model.safetensors: tensor "' broken no
expect 4 'broken/model.safetensors: tensor "' ranks 2 "$program" evaluate broken --data held_out.txt
said_once
sed -i 's/"hidden_act": "silu"/"hidden_act": "gelu"/' broken/config.json
convert 4 'broken/config.json: "hidden_act" is "gelu"' broken no
expect 4 'hf: is a HuggingFace folder' train 2 fresh --set checkpoint.resume=hf
said_once
# A disk that takes no more.
for format in checkpoint huggingface; do
  (
    trap '' XFSZ
    ulimit -f 20
    convert 4 'File too large' run no --format "$format" 2>/dev/null
    exit "$failed"
  ) || failed=1
done
[ -z "$(find . -maxdepth 1 -name 'no*')" ] || fail "a conversion that failed left something"
finish
