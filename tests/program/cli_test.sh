#!/usr/bin/env bash
# The command line as people meet it: exit codes, one message, help.   cli_test.sh PROGRAM CONFIGS
source "$(dirname "$0")/common.sh"
configs=$2

expect 0 'Subcommands:' "$program" --help
expect 0 'annulus 0.1.0' "$program" --version
for subcommand in train evaluate generate plan bench inspect plot prepare; do
  expect 0 "Usage: annulus $subcommand" "$program" $subcommand --help
done
expect 2 'error: unknown subcommand "trian" (did you mean "train"?); see annulus --help' "$program" trian
expect 2 'A subcommand is required; see annulus --help' "$program"
expect 2 'config is required; see annulus train --help' "$program" train
expect 2 'unexpected argument "--jsn" (did you mean "--json"?)' "$program" evaluate x --data y --jsn
expect 2 '--gpus: Value 0 not in range 1 to' "$program" plan "$configs/quickstart.toml" --gpus 0
expect 2 '--gpus and --ranks exclude each other' "$program" plan "$configs/quickstart.toml" --gpus 1 --ranks 1
expect 2 'cannot read config none.toml: No such file or directory' "$program" train none.toml
expect 2 'did you mean train.steps?' "$program" plan "$configs/quickstart.toml" --set train.step=3
expect 2 'train.steps = 0: expected' "$program" plan "$configs/quickstart.toml" --set schedule.warmup_steps=0 --set train.steps=0
expect 3 'cannot read none: No such file or directory' "$program" plot none
expect 4 'none' "$program" inspect none

# A picture of three losses: the axes run 0 to 10 and 1 to 3 over 64 … 836 and 408 … 44 pixels.
printf '%s\n' '{"kind":"step","step":0,"loss":3}' '{"kind":"event","step":0}' '{"kind":"step","step":5,"loss":2}' \
  '{"kind":"step","step":10,"loss":1}' '{"kind":"eval","step":5,"loss":2.5}' >metrics.jsonl
printf '{"kind":"step","step":11,"lo' >>metrics.jsonl # a record that is being written
expect 0 'picture.svg' "$program" plot metrics.jsonl -o picture.svg
expect 0 'points="64.0,44.0 450.0,226.0 836.0,408.0 "' cat picture.svg
expect 0 '<circle cx="450.0" cy="135.0"' cat picture.svg
expect 0 'training 1.000' cat picture.svg
# The bold line is a running mean: of the last three losses, 3, 1, 3, at the end of 200 that alternate.
for ((i = 0; i < 200; i++)); do echo "{\"kind\":\"step\",\"step\":$i,\"loss\":$((1 + 2 * (i % 2)))}"; done >long.jsonl
expect 0 'long.svg' "$program" plot long.jsonl -o long.svg
expect 0 'training 2.333' cat long.svg
printf 'no JSON\n' >bad.jsonl
expect 3 'bad.jsonl:1: not a JSON object' "$program" plot bad.jsonl

# Under mpirun every rank fails alike, and one of them says so.
expect 2 'cannot read config none.toml' ranks 3 "$program" train none.toml
said_once
expect 2 'unknown subcommand' ranks 3 "$program" trian
said_once
expect 0 'Subcommands:' ranks 2 "$program" --help
[ "$(grep -c 'Subcommands:' out)" -eq 1 ] || fail 'help more than once' out
# A rank that fails alone ends the job: here the only one whose folder lacks the config.
mkdir -p with without
cp "$configs/quickstart.toml" with/run.toml
cat >one.sh <<EOF
[ "\$OMPI_COMM_WORLD_RANK" = 1 ] && cd without || cd with
exec "$program" train run.toml
EOF
expect 2 'cannot read config run.toml' ranks 2 timeout 60 bash one.sh

finish
