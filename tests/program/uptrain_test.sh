#!/usr/bin/env bash
# uptrain: a share of the source's tokens by its own recipe, from its weights, in a folder of its own.
#   uptrain_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run
uptrain() { ranks "$1" "$program" uptrain "${@:2}"; }
key() { sed -n "s/^$2 = //p" "$1/config.toml"; } # key RUN KEY

expect 0 'saved' train 2 run --set 'data.validation=["held_out.txt"]'
loss_of() { sed -n 's/^loss  *\([0-9.]*\) .*/\1/p' out; }
expect 0 'loss' ranks 1 "$program" evaluate run --data held_out.txt
before=$(loss_of)

# A quarter of 20 steps of 192 tokens; 5 warm-up steps of 20 become 1 of 5.
expect 0 'weights from run/step-00000020 (step 20), zero optimiser state' uptrain 2 run --fraction 0.25
have_steps 1 5 run-uptrained
[ "$(key run-uptrained warmup_steps)" = 1 ] || fail "warm-up is $(key run-uptrained warmup_steps)" run-uptrained/config.toml
[ "$(key run-uptrained lr)" = "$(key run lr)" ] || fail "another learning rate"
expect 0 'from the weights of run/step-00000020' "$program" inspect run-uptrained

# With nothing learnt the loss is the source's: the weights are what it starts from. Started again it goes on.
expect 0 'saved still/step-00000002' uptrain 2 run/step-00000020 --tokens 300 --run still --set optimizer.lr=1e-30
expect 0 'loss' ranks 1 "$program" evaluate still --data held_out.txt
[ "$(loss_of)" = "$before" ] || fail "loss $(loss_of) after no learning, $before before"
expect 0 'going on from still/step-00000002' uptrain 2 run/step-00000020 --tokens 400 --run still --set optimizer.lr=1e-30
have_steps 1 3 still

# On other ranks, longer, with scaled positions and other data.
expect 0 'saved long/step-00000005' uptrain 3 run --run long --tokens 1900 --set train.sequence_length=192 \
  --set model.rope_scaling.rope_type=linear --set model.rope_scaling.factor=2.0 --set 'data.sources=["data/long.txt"]'
[ "$(key long sequence_length)" = 192 ] || fail "length $(key long sequence_length)"
expect 0 'saved fixed/step-00000007' uptrain 1 run --run fixed --set train.steps=7 --set schedule.warmup_steps=3
[ "$(key fixed warmup_steps)" = 3 ] || fail "warm-up $(key fixed warmup_steps)"

# Converted models: fewer KV heads by the source's recipe; what HuggingFace holds by a given one.
expect 0 '' "$program" convert run gqa --kv-heads 1
expect 0 'saved gqa-uptrained/step-00000005' uptrain 2 gqa --fraction 0.25
[ "$(key gqa-uptrained num_key_value_heads)" = 1 ] || fail "not the converted model" gqa-uptrained/config.toml
expect 0 '' "$program" convert run hf --format huggingface
expect 0 'saved hf-uptrained/step-00000002' uptrain 2 hf --config tiny.toml --tokens 300 --set optimizer.lr=1e-30 \
  --set train.precision=fp32
expect 0 'loss' ranks 1 "$program" evaluate hf-uptrained --data held_out.txt
[ "$(loss_of)" = "$before" ] || fail "loss $(loss_of) from HuggingFace's folder, $before before"

# ---- refused
refused() { # CODE TEXT ARGUMENTS...
  expect "$1" "$2" uptrain 2 "${@:3}"
  said_once
}
refused 2 '--fraction 0: expected a number above 0' run --fraction 0 --run bad
refused 2 'this model has no recipe' hf --run bad
refused 2 '--fraction nan' run --fraction nan --run bad
refused 2 '--fraction excludes --tokens' run --fraction 0.1 --tokens 100 --run bad
refused 2 'model.hiden_size' run --run bad --set model.hiden_size=8
refused 4 'nowhere' nowhere --run bad
refused 4 'model.embed_tokens.weight' run --run bad --set model.hidden_size=64
[ ! -e bad/config.toml ] || fail "a refused run began"
finish
