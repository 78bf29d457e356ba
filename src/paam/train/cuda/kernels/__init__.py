"""Kernels in Triton; they are imported on a GPU only."""
