#!/bin/sh
# Trains the digits on 4 ranks twice: undisturbed, and with a rank killed in step 40 and another one in step 75.
# The receipts must agree to the last bit on the backend shm. On others the order of a sum depends on how DDP has packed the
# gradients, which it finds out anew in each attempt: there the samples must agree, and the weights may differ in last bits.
# Arguments go to examples/digits.py; it takes 3 epochs to get that far.
cd "$(dirname "$0")/.." || exit
phalanx="${PYTHON:-python3} -m phalanx"
place=$(mktemp -d) || exit
trap 'rm -rf "$place"' EXIT

echo "undisturbed:"
$phalanx run --nproc-per-node 4 examples/digits.py "$@" > "$place/undisturbed" || exit
cat "$place/undisturbed"

echo
echo "with two ranks killed:"
$phalanx run --nproc-per-node 4 --max-restarts 2 examples/digits.py \
    --checkpoints "$place/checkpoints" --kill 1@40 --kill 3@75 "$@" > "$place/killed" || exit
cat "$place/killed"

echo
for run in undisturbed killed; do
    grep -E 'samples  |replicas|accuracy' "$place/$run" > "$place/$run.receipt"
done
backend=$(sed -n 's/.*receipt for .* backend //p' "$place/killed")
samples() { grep 'samples  ' "$place/$1.receipt"; grep -c 'replicas   equal' "$place/$1.receipt"; }
if cmp -s "$place/undisturbed.receipt" "$place/killed.receipt"; then
    echo "the same receipt: every sample once, and the same weights to the last bit (backend $backend)"
elif [ "$backend" != shm ] && [ "$(samples undisturbed)" = "$(samples killed)" ]; then
    echo "every sample once, and weights that differ in their last bits: only the backend shm keeps those, and this was $backend"
else
    echo "THE RECEIPTS DIFFER"
    exit 1
fi
