"""Random networks as a test: drawn as Python source, pruned at random, and checked against themselves."""
