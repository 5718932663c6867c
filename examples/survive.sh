#!/bin/sh
# Trains the digits on 4 ranks twice: undisturbed, and with a rank killed in step 40 and another one in step 75.
# The receipts must agree to the last bit on the backend shm. On others the order of a sum depends on how DDP has packed the
# gradients, which it decides again in each attempt: there the samples must agree, and the weights may differ in the last bits.
# Arguments are passed to examples/digits.py; it needs at least 3 epochs to reach step 75.
cd "$(dirname "$0")/.." || exit
phalanx="${PYTHON:-python3} -m phalanx"
directory=$(mktemp -d) || exit
trap 'rm -rf "$directory"' EXIT

echo "undisturbed:"
$phalanx run --nproc-per-node 4 examples/digits.py "$@" > "$directory/undisturbed" || exit
cat "$directory/undisturbed"

echo
echo "with two ranks killed:"
$phalanx run --nproc-per-node 4 --max-restarts 2 examples/digits.py \
    --checkpoints "$directory/checkpoints" --kill 1@40 --kill 3@75 "$@" > "$directory/killed" || exit
cat "$directory/killed"

echo
for run in undisturbed killed; do
    grep -E 'samples  |replicas|accuracy' "$directory/$run" > "$directory/$run.receipt"
done
backend=$(sed -n 's/.*receipt for .* backend //p' "$directory/killed")
samples() { grep 'samples  ' "$directory/$1.receipt"; grep -c 'replicas   equal' "$directory/$1.receipt"; }
if cmp -s "$directory/undisturbed.receipt" "$directory/killed.receipt"; then
    echo "the same receipt: every sample once, and the same weights to the last bit (backend $backend)"
elif [ "$backend" != shm ] && [ "$(samples undisturbed)" = "$(samples killed)" ]; then
    echo "every sample once, but the weights differ in their last bits: only the backend shm keeps them equal, and this was $backend"
else
    echo "THE RECEIPTS DIFFER"
    exit 1
fi
