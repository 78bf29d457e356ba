"""The training engine.

batches.py     a split on the device, shuffled and augmented as a pure function of seed and epoch
optimizers.py  settings -> torch optimisers
checkpoint.py  one file per position of a run, written whole or not at all, behind training
pause.py       a stop inside an epoch
directory.py   the run directory: lock, recipe, what may change on the way
capture.py     a step as one CUDA graph
engine.py      the phases of a schedule, epoch by epoch
run.py         recipe -> run directory
"""
