#!/usr/bin/env bash
# A disk that is full: training goes on, the error is said and in the exit code, older checkpoints stay, and starting
# again when there is room goes on.   full_disk_test.sh PROGRAM
source "$(dirname "$0")/common.sh"
tiny_run

# full TEXT COMMAND...: goes on to step 20 from the checkpoint of step 10 in `run`, and the next one does not fit.
full() {
  expect 4 "going on from $run/step-00000010 (step 10)" "${@:2}"
  said 'warning: the checkpoint of step 20 was not written: rank ' "$1" 'older checkpoints stay' 'step 20/20' \
    "the last checkpoint could not be saved (see the warning above); $run/step-00000010 is whole"
  said_once
  [ "$(newest $run)" = step-00000010 ] || fail "the newest checkpoint is $(newest $run)" out
  [ -z "$(find $run -name '*.tmp')" ] || fail "half a checkpoint is left" out
  expect 0 'all compared, all right' "$program" inspect --verify $run/step-00000010
}

# A limit to the size of files stands for it everywhere: SIGXFSZ is ignored, so writing fails. Not for the files of
# MPI: mpirun is without it, and the ranks talk over sockets.
cat >limit.sh <<'END'
trap '' XFSZ
ulimit -f 64 # KiB
exec "$@"
END
small_files() {
  OMPI_MCA_btl=self,tcp ranks 2 bash limit.sh "$program" train tiny.toml --set "checkpoint.dir=$1"
}
run=limited
expect 0 'saved' train 2 limited --set train.steps=10
full 'File too large' small_files limited
expect 0 'going on from limited/step-00000010 (step 10)' train 2 limited
have_steps 1 20 limited
# The first save already.
expect 4 'the last checkpoint could not be saved (see the warning above); there is no older one' small_files first
said_once

# One in the middle, whose folder is a file: the end is whole, and the exit code still tells of the other.
mkdir middle
: >middle/step-00000010.tmp
expect 4 'middle/step-00000020 is whole, but 1 earlier save failed, first that of step 10' train 2 middle
said 'warning: the checkpoint of step 10 was not written: rank 0: '
said_once

# A real one, where this may be mounted.
mkdir small
if mount -t tmpfs -o size=8m tmpfs small 2>mount.err; then
  trap 'umount small; rm -rf "$work"' EXIT
  expect 0 'saved' train 2 small/run --set train.steps=10
  head -c 9m /dev/zero >small/rest 2>rest.err
  truncate -s -150k small/rest
  run=small/run
  full 'No space left on device' train 2 small/run
  rm small/rest
  expect 0 'saved small/run/step-00000020' train 2 small/run
else
  echo "not tested on a small file system: $(cat mount.err)"
fi
finish
