"""The training engine.

phase.py       phases, of which methods consist
engine.py      runs the phases, epoch by epoch
steps.py       one training step
networks.py    the gated, small, dense and teacher networks
optimizers.py  settings -> torch optimisers
state.py       the engine's state, for checkpoints
mid_epoch.py   a stop inside an epoch
cuda           CUDA graphs, streams and Triton kernels
"""
