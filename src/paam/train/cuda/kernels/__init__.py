"""Triton kernels; import on GPU machines only."""
